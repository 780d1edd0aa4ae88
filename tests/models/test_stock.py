"""Users' losses that are means, and models that an engine must refuse with a clear reason."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import Comm

Batch = dict[str, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def labelled(seed: int = 0) -> Batch:
    """13 samples of 4 positions; their numbers of labels are 0, 4, 1, 0, 3, ..."""
    generator = torch.Generator().manual_seed(seed)
    x_BTC = torch.randn(13, 4, 5, generator=generator, dtype=torch.float64)
    y_BT = torch.randint(3, (13, 4), generator=generator)
    y_BT[torch.arange(4) >= torch.tensor([0, 4, 1, 0, 3, 2, 0, 4, 1, 4, 2, 0, 3])[:, None]] = -100
    return {"x": x_BTC, "y": y_BT}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def count(batch: Batch) -> int:
    return int((batch["y"] != -100).sum())


def step(comm: Comm, model: nn.Module, sizes: list[int], **settings: Any) -> tuple[float, float | None, Any]:
    """One step on microbatches of these sizes, dealt to the ranks in turn; loss, norm and weights."""
    loss_fn = plait.sum_of_mean(mean_loss, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    usual: dict[str, Any] = {"strategy": "zero3", "loss_fn": loss_fn, "count_fn": count, "clip": 0.1}
    engine = plait.Engine(model, comm, optimizer=optimizer, **(usual | settings))
    parts = [
        dict(zip(("x", "y"), p, strict=True)) for p in zip(*(t.split(sizes) for t in labelled().values()), strict=True)
    ]
    share = len(parts) // comm.mesh.data_size
    first = comm.data_rank * share
    result = engine.step(parts[first : first + share])
    return result.loss, result.grad_norm, engine.full_state_dict()


@pytest.mark.parametrize(
    "mesh, sizes, settings",
    [
        ("shard=1", [13], {}),
        ("shard=1", [1, 2, 1, 6, 3], {}),
        ("shard=2", [1, 1, 1, 1, 4, 5], {}),
        ("shard=3", [4, 2, 7], {"strategy": "ddp"}),
        ("shard=2", [1, 0, 12, 0], {"strategy": "zero2"}),
        ("pipe=2 shard=2", [1, 1, 5, 6], {"schedule": "zb_h1"}),
    ],
)
def test_a_mean_over_ragged_counts_is_the_mean_of_the_whole_batch(
    mesh: str, sizes: list[int], settings: dict[str, Any]
) -> None:
    """Microbatches of 0 labels, and of no samples, among others; the truth is one mean over everything."""
    model = net()
    truth = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(truth.parameters(), lr=1e-2)
    loss = mean_loss(truth, labelled())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1).item()
    optimizer.step()
    every = plait.run_threads(mesh, lambda comm: step(comm, copy.deepcopy(model), sizes, **settings), deadline=20)
    for found, found_norm, weights in every:
        assert found == pytest.approx(loss.item(), rel=1e-12)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        for name, value in truth.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-9)


def test_nothing_to_count_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    model, batch = net(), labelled()
    batch["y"][:] = -100
    assert mean_loss(model, batch).isnan()
    loss = plait.sum_of_mean(mean_loss, count)(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# ---- refused ------------------------------------------------------------------------------------------------------


def refused(words: str, model: nn.Module, mesh: str = "shard=1", row: str = "ddp") -> None:
    with pytest.raises(ValueError, match=words):
        plait.run_threads(mesh, lambda comm: plait.Engine(model, comm, strategy=row), deadline=20)


def test_lazy_modules_have_to_be_called_once() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    refused(r"6 parameters have no shape yet \(0.weight, 0.bias, 1.weight\): call the model once", model)
    model(torch.ones(2, 5))
    plait.run_threads("shard=2", lambda comm: plait.Engine(copy.deepcopy(model), comm))


@pytest.mark.parametrize("table", [nn.Embedding(5, 3, max_norm=1.0), nn.EmbeddingBag(5, 3, max_norm=1.0)])
def test_a_table_that_a_forward_writes_to(table: nn.Module) -> None:
    refused("'0' has max_norm: each rank's forward would rewrite", nn.Sequential(table), "shard=2")
    plait.run_threads("shard=1", lambda comm: plait.Engine(nn.Sequential(table), comm))


def test_a_state_that_is_no_tensor() -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    refused(r"'0' has get_extra_state\(\), which plait neither gathers nor saves", nn.Sequential(Counts(3, 3)))


def test_compiled_modules() -> None:
    model = net()
    model[2].compile(backend="eager")  # type: ignore[operator]
    refused("'2' is compiled, and the compiler would trace into the engine's gathers", model)
    refused("'the model' is compiled", torch.compile(net(), backend="eager"))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_modules() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    refused("'1' is a torch.jit.ScriptModule, which runs outside of Python", model)


@pytest.mark.usefixtures("compiler_in_threads")
@pytest.mark.filterwarnings("ignore")  # the compiler's own, which it hides for one thread only
@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_compiled_functions_inside_of_modules(row: str) -> None:
    """A compiled function, without the engine's hooks: the same numbers as the function itself."""

    class Activation(nn.Module):
        def __init__(self, compiled: bool) -> None:
            super().__init__()
            self.work = torch.compile(swish, backend="aot_eager", dynamic=True) if compiled else swish

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.work(x)
            return out

    def body(comm: Comm) -> list[float]:
        with plait.empty_parameters():
            model = nn.Sequential(nn.Linear(5, 5), Activation(compiled), nn.Dropout(0.1), nn.Linear(5, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = plait.Engine(model, comm, strategy=row, optimizer=optimizer)
        losses = []
        for seed in range(3):
            x = torch.randn(4 + seed, 5, generator=torch.Generator().manual_seed(10 * seed + comm.rank))
            engine.backward(model(x).square().sum(), count=x.numel())
            optimizer.step()
            losses.append(engine.last.loss)
        return losses

    found = {}
    for compiled in (False, True):
        found[compiled] = plait.run_threads("shard=2", body, deadline=60)[0]
    assert found[True] == pytest.approx(found[False], rel=1e-6)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.5 * x)
