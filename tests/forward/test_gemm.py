"""Linear layers are multiplied by the chosen Gemm, in forward and backward, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import WIDTH, Block, deal, distinct, loss_sum
from torch import Tensor, nn
from weight_grads_cases import Apply, Deferring, assert_equal, draws, grads, input_of, multiplying, parameters_of

from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.tensor.gemm import ONEDNN, has_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")

EPS = torch.finfo(torch.float32).eps


def trained(model: nn.Module, xs: Sequence[Tensor], mode: Any, wants: bool = True) -> list[Tensor | None]:
    """Outputs, gradients of the inputs and of the parameters, of forwards under a mode."""
    model.zero_grad()
    inputs, outputs = [input_of(x, wants) for x in xs], []
    for m, x in enumerate(inputs):
        with mode:
            outputs.append(model(x))
        outputs[-1].backward(draws(outputs[-1], m))
    return [*(y.detach() for y in outputs), *grads(inputs), *grads(parameters_of(model))]


def deferred(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The same with products of weights put off, made by the same Gemm."""
    model.zero_grad()
    way, leaf = Deferring(model.parameters(), ONEDNN), input_of(x, True)
    way.begin(0)
    with way:
        y = model(leaf)
    way.resume(0)
    y.backward(draws(y, 0))
    way.weigh(0)
    return [y.detach(), *grads([leaf]), *grads(parameters_of(model))]


def close(got: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> None:
    """fp32 beside fp64: sums of at most 300 terms of size 1, so 300 eps of the largest."""
    for ours, truth in zip(got, exact, strict=True):
        assert ours is not None and truth is not None and ours.dtype == torch.float32 and ours.shape == truth.shape
        gap = (ours - truth).abs().max().item()
        assert gap <= 300 * EPS * max(1.0, truth.abs().max().item()), gap


CALLS: dict[str, Callable[..., Tensor]] = {
    "positions": lambda x, w, b=None: F.linear(x, w, b) if b is not None else F.linear(x, w),
    "bias is None": lambda x, w, b=None: F.linear(x, w, b),
    "keywords": lambda x, w, b=None: F.linear(bias=b, weight=w, input=x),
    "half of them": lambda x, w, b=None: F.linear(x, bias=b, weight=w),
}


@pytest.mark.parametrize("shape", [(5,), (7, 5), (1, 5), (3, 7, 5), (2, 3, 5, 9)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_linear_however_it_is_called(
    call: str, bias: bool, shape: tuple[int, ...], onednn_calls: list[tuple[int, ...]]
) -> None:
    """One product in forward, two in backward; a bias that is absent does not send the layer back to torch."""
    more = [draws(torch.empty(6), 2)] if bias else []
    model = Apply(CALLS[call], draws(torch.empty(6, shape[-1]), 1), *more)
    x = draws(torch.empty(shape), 0)
    got = trained(model, [x], multiplying(ONEDNN))
    rows = x.numel() // shape[-1]
    assert onednn_calls == [(rows, 6), (rows, shape[-1]), (6, shape[-1])]
    assert_equal(got, deferred(model, x))
    with torch.no_grad():
        exact = Apply(CALLS[call], *(p.double() for p in model.parameters()))
    close(got, [t if t is None else t.float() for t in exact_of(exact, x)])


def exact_of(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The same in fp64, by torch, from the gradient that was drawn for fp32."""
    leaf = x.double().requires_grad_()
    y = model(leaf)
    y.backward(draws(y.float(), 0).double())
    return [y.detach(), leaf.grad, *grads(parameters_of(model))]


@pytest.mark.parametrize("bias", [False, True])
def test_the_module(bias: bool, onednn_nudged: None, onednn_calls: list[tuple[int, ...]]) -> None:
    model = nn.Linear(300, 31, bias=bias)
    x = draws(torch.empty(257, 300), 0)
    got = trained(model, [x], multiplying(ONEDNN))
    assert onednn_calls == [(257, 31), (257, 300), (31, 300)]
    y = ONEDNN.linear(x, model.weight.detach(), model.bias.detach() if bias else None)
    assert_equal(got[:1], [y])
    assert not torch.equal(F.linear(x, model.weight, model.bias).detach(), y)


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5)])
def test_no_product_is_made_that_nobody_wants(shape: tuple[int, ...], onednn_calls: list[tuple[int, ...]]) -> None:
    x, model = draws(torch.empty(shape), 0), nn.Linear(5, 6)
    rows = x.numel() // 5
    trained(model, [x], multiplying(ONEDNN), wants=False)
    assert onednn_calls == [(rows, 6), (6, 5)], "of an input that wants no gradient"
    onednn_calls.clear()
    model.weight.requires_grad_(False)
    trained(model, [x], multiplying(ONEDNN))
    assert onednn_calls == [(rows, 6), (rows, 5)], "of a weight that is frozen"
    assert model.weight.grad is None and model.bias.grad is not None
    onednn_calls.clear()
    with torch.no_grad(), multiplying(ONEDNN):
        y = model(x)
    assert onednn_calls == [(rows, 6)] and y.grad_fn is None and not y.requires_grad


# ---- what is left to torch ------------------------------------------------------------------------------------------


def test_products_that_are_no_linear_layer(onednn_calls: list[tuple[int, ...]]) -> None:
    x, w = draws(torch.empty(7, 5), 0), draws(torch.empty(6, 5), 1)
    with multiplying(ONEDNN):
        made = x @ w.t(), F.conv1d(x.t()[None], w[:, :, None]), nn.Bilinear(5, 5, 2)(x, x)
    assert all(y.isfinite().all() for y in made)
    assert not onednn_calls


@pytest.mark.parametrize("shapes", [((7, 5), (6, 4)), ((7, 5), (6, 5), (4,)), ((), (6, 5)), ((7, 5), (6, 5, 1))])
def test_what_torch_refuses_it_refuses(shapes: Sequence[tuple[int, ...]]) -> None:
    told = []
    for mode in (torch.enable_grad(), multiplying(ONEDNN)):
        with pytest.raises(RuntimeError) as error, mode:
            F.linear(*map(torch.zeros, shapes))
        told.append(str(error.value))
    assert told[0] == told[1]


# ---- the engine -----------------------------------------------------------------------------------------------------


def data() -> dict[str, Tensor]:
    return {"x": draws(torch.empty(13, 5), 3), "mask": torch.ones(13)}


MASTER = "mine: full | full | full, pending(shard, replica) | full @cpu"
"""The optimizer updates a copy of parameters that are whole."""


def engine_of(comm: Comm, row: str, name: str, **settings: Any) -> Engine:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = draws(parameter, seed) / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(
        model,
        comm,
        strategy=row,
        optimizer=optimizer,
        loss_fn=loss_sum,
        count_fn=lambda batch: int(batch["mask"].sum()),
        gemm=name,
        **settings,
    )


@pytest.mark.parametrize(
    ("row", "mesh", "schedule", "recompute"),
    [
        ("ddp", "replica=2", None, None),
        ("zero3", "shard=2", None, None),
        ("zero3", "shard=2", None, "full"),
        ("zero3", "pipe=2", "1f1b", None),
        ("zero2", "pipe=2", "zb_h1", None),
        (MASTER, "replica=2", None, None),
    ],
)
def test_an_engine_multiplies_by_it(
    row: str, mesh: str, schedule: str | None, recompute: str | None, onednn_calls: list[tuple[int, ...]]
) -> None:
    """6 linear layers: their forwards, 6 products of weights, and 5 of inputs, for the data want none."""
    shape = Mesh.parse(mesh)

    def body(comm: Comm, name: str) -> dict[str, Tensor]:
        engine = engine_of(comm, row, name, recompute=recompute, schedule=schedule)
        engine.step(deal(data(), shape, comm.rank, 2))
        return engine.full_state_dict()

    ours, theirs = (run(shape, partial(body, name=name), deadline=20)[0] for name in ("onednn", "torch"))
    again = 4 if recompute else 0
    assert len(onednn_calls) == 2 * shape.data_size * (6 + 6 + 5 + again)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def test_cut_layers_under_autocast_stay_with_torch(onednn_calls: list[tuple[int, ...]]) -> None:
    """oneDNN's operator knows nothing of autocast: the products are in bf16, as with torch."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)

        def tensor_plan(self) -> dict[str, str]:
            return {"up": "column", "down": "row"}

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.up(x).tanh())
            return out

    seen: list[torch.dtype] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        seen.append(y.dtype)
        return y.float().square().sum()

    def losses(gemm: str) -> list[float]:
        def body(comm: Comm) -> list[float]:
            net = distinct(Pair()).float()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            engine = Engine(net, comm, strategy="ddp", gemm=gemm, optimizer=optimizer, loss_fn=loss, count_fn=len)
            return [engine.step([draws(torch.empty(7, WIDTH), m)]).loss for m in range(2)]

        return run(Mesh(tensor=2), body)[0]

    assert losses("onednn") == losses("torch") and set(seen) == {torch.bfloat16} and not onednn_calls
