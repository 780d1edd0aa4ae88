"""Mixed precision: what is kept in which dtype, what a wider sum saves, and steps that are left out."""

from __future__ import annotations

import pytest
import torch
from engine_cases import ROWS, Net
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.predict.cost import differences, predict_step
from plait.predict.memory import held
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh
from plait.table.precision import LossScale

MESH = Mesh(replica=2, shard=2)
BF16 = torch.bfloat16


def loss_sum(model: nn.Module, x_BD: Tensor) -> Tensor:
    return torch.as_tensor(model(x_BD.to(next(model.parameters()).dtype)).float().square().sum())


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(step: int, data_rank: int, num: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return [torch.randn(3, 5, generator=generator) for _ in range(num)]


@pytest.mark.parametrize("offload", [False, True], ids=["here", "cpu"])
@pytest.mark.parametrize("row", ROWS)
def test_state_lies_in_the_dtypes_of_the_row_and_its_bytes_are_predicted(row: str, offload: bool) -> None:
    strategy = TABLE[row].mixed("bf16")
    strategy = strategy.offloaded() if offload else strategy
    models = [net() for _ in range(MESH.size)]

    def rank_main(comm: Comm) -> None:
        model = models[comm.rank]
        engine = Engine(model, comm, strategy=strategy, optimizer=adam(model), loss_fn=loss_sum, count_fn=len, clip=0.1)
        assert all(p.dtype == BF16 for p in model.parameters())
        for step in range(2):
            engine.step(batches(step, comm.rank))
        for piece in engine.placed.owned:
            assert piece.view.dtype == piece.gradient.dtype == torch.float32
        assert engine.optimizer is not None
        assert all(s["exp_avg"].dtype == torch.float32 for s in engine.optimizer.state.values())
        ahead, kept = held(engine.placed.layouts(), comm.mesh, strategy, comm.rank, 2), engine.placed.bytes_held()
        assert (kept["params"], kept["grads"], kept["optimizer"]) == (ahead.params, ahead.grads, ahead.optimizer)

    run(MESH, rank_main, deadline=20)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("cut", ["element", "tensor"])
def test_parameters_are_the_rounded_masters_and_a_state_dict_has_the_masters(row: str, cut: str) -> None:
    models = [net() for _ in range(MESH.size)]
    original = {name: value.clone() for name, value in models[0].state_dict().items()}

    def rank_main(comm: Comm) -> dict[str, Tensor]:
        model = models[comm.rank]
        strategy = TABLE[row].mixed("bf16")
        engine = Engine(model, comm, strategy=strategy, optimizer=adam(model), loss_fn=loss_sum, count_fn=len, cut=cut)  # type: ignore[arg-type]
        before = engine.full_state_dict()
        assert all(torch.equal(before[name], value) for name, value in original.items()), (
            "nothing is lost on the way in"
        )
        engine.step(batches(0, comm.rank))
        state = engine.full_state_dict()
        seen: dict[str, Tensor] = {}

        def look(module: nn.Module, _: object) -> None:
            seen.update({n: p.detach().clone() for n, p in module.named_parameters(recurse=False)})

        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda m, a, name=name: seen.update(
                    {f"{name}.{n}".lstrip("."): p.detach().clone() for n, p in m.named_parameters(recurse=False)}
                )
            )
        with torch.no_grad():
            model(torch.zeros(1, 5, dtype=BF16))
        assert seen.keys() == state.keys()
        for name, value in state.items():
            assert value.dtype == torch.float32 and not torch.equal(value, original[name])
            assert torch.equal(seen[name], value.to(BF16)), name
        engine.load_full_state_dict(before)
        again = engine.full_state_dict()
        assert all(torch.equal(again[name], value) for name, value in before.items())
        return state

    states = run(MESH, rank_main, deadline=20)
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


class Single(nn.Module):
    """y = w x, one weight: its gradient is the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x_B: Tensor) -> Tensor:
        return self.w * x_B


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_gradients_accumulate_in_fp32_where_bf16_would_lose_them(row: str) -> None:
    """256 + 1 + 1 ... is 256 for ever in bf16, whose numbers near it are 2 apart."""
    num = 33

    def gradient(dtypes: str) -> Tensor:
        models = [Single() for _ in range(2)]
        strategy = TABLE[row].mixed("bf16", dtypes)

        def rank_main(comm: Comm) -> Tensor:
            model = models[comm.rank]
            found: list[Tensor] = []
            engine = Engine(
                model,
                comm,
                strategy=strategy,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                loss_fn=lambda m, x: m(x).float().sum(),
                count_fn=lambda x: 1,
                listener=lambda event, e: (
                    found.extend(o.gradient.clone() for o in e.placed.owned) if event == "reduced" else 0
                ),
            )
            values = [256.0, *[1.0] * (num - 1)] if comm.rank == 0 else [0.0] * num
            engine.step([torch.tensor([value], dtype=BF16) for value in values])
            return torch.cat([f.reshape(-1) for f in found]) if found else torch.zeros(0)

        pieces = run(Mesh(shard=2), rank_main, deadline=20)
        return next(p for p in pieces if p.numel()) * 2 * num

    exact = 256 + num - 1
    assert gradient("fp32").item() == pytest.approx(exact, rel=0.01)  # each is rounded once, as 1/count seeds it
    assert gradient("bf16").item() < exact - 20


@pytest.mark.parametrize("row", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_step_that_is_not_finite_anywhere_is_made_by_nobody(row: str, who: int) -> None:
    """The inf arises on one rank, and all leave the step out, halve the scale and go on."""
    mesh = Mesh(shard=3)
    models = [net() for _ in range(mesh.size)]

    def rank_main(comm: Comm) -> list[tuple[bool, float]]:
        model = models[comm.rank]
        engine = Engine(
            model,
            comm,
            strategy=TABLE[row].mixed("fp16"),
            optimizer=adam(model),
            loss_fn=loss_sum,
            count_fn=len,
            clip=1.0,
            loss_scale=LossScale(256.0, interval=2),
        )
        story = []
        for step in range(5):
            before = engine.full_state_dict()
            mine = batches(step, comm.rank)
            if step == 1 and comm.rank == who:
                mine[1] = mine[1].index_fill(0, torch.tensor([1]), 6e4)  # its square is no fp32-scaled fp16 gradient
            result = engine.step(mine)
            after = engine.full_state_dict()
            moved = any(not torch.equal(after[n], before[n]) for n in after)
            assert moved == result.made
            assert engine.gradients.loss_scale is not None
            story.append((result.made, engine.gradients.loss_scale.scale))
            assert result.made == (result.grad_norm is not None)
        counters = {float(s["step"]) for s in engine.optimizer.state.values()} if engine.optimizer else set()
        assert counters <= {4.0}, "four steps were made, and the optimizer counted four"
        return story

    for story in run(mesh, rank_main, deadline=20):
        assert story == [(True, 256.0), (False, 128.0), (True, 128.0), (True, 256.0), (True, 256.0)]


def test_a_loss_scale_saves_what_fp16_would_lose_and_changes_nothing_else() -> None:
    """Gradients of 1e-8 are zero in fp16; scaled by 2^16 they are not.  In fp32 a power of two changes no bit."""

    def gradients(dtype: str, scale: float | None, size: float) -> list[Tensor]:
        models = [net() for _ in range(2)]
        strategy = TABLE["zero1"].mixed(dtype, "fp32") if dtype == "fp16" else TABLE["zero1"]

        def rank_main(comm: Comm) -> list[Tensor]:
            model = models[comm.rank]
            found: list[Tensor] = []
            engine = Engine(
                model,
                comm,
                strategy=strategy,
                optimizer=adam(model),
                loss_fn=lambda m, x: loss_sum(m, x) * size,
                count_fn=len,
                loss_scale=None if scale is None else LossScale(scale),
                listener=lambda event, e: (
                    found.extend(o.gradient.clone() for o in e.placed.owned) if event == "reduced" else 0
                ),
            )
            engine.step(batches(0, comm.rank))
            return found

        return [g for found in run(Mesh(shard=2), rank_main, deadline=20) for g in found]

    exact = gradients("fp32", None, 1e-9)
    assert all(torch.equal(a, b) for a, b in zip(exact, gradients("fp32", 2.0**16, 1e-9), strict=True))
    lost, saved = gradients("fp16", None, 1e-9), gradients("fp16", 2.0**16, 1e-9)
    assert sum(int(g.count_nonzero()) for g in lost) < sum(int(g.count_nonzero()) for g in saved) / 2
    for ours, theirs in zip(saved, exact, strict=True):
        assert (ours - theirs).abs().max() <= 0.02 * max(t.abs().max() for t in exact)


def test_ranks_with_different_loss_scales_are_refused_and_one_scale_serves_many_engines() -> None:
    shared = LossScale(64.0, interval=1)
    models = [net() for _ in range(4)]

    def scale_after_a_step(comm: Comm, model: nn.Module, scale: LossScale) -> float:
        strategy = TABLE["zero1"].mixed("fp16")
        engine = Engine(
            model, comm, strategy=strategy, optimizer=adam(model), loss_fn=loss_sum, count_fn=len, loss_scale=scale
        )
        engine.step(batches(0, comm.rank))
        return engine.gradients.scale

    with pytest.raises(ValueError, match="loss_scale"):
        run(Mesh(shard=2), lambda comm: scale_after_a_step(comm, models[comm.rank], LossScale(2.0**comm.rank)))
    scales = run(Mesh(shard=2), lambda comm: scale_after_a_step(comm, models[2 + comm.rank], shared))
    assert scales == [128.0, 128.0] and shared.scale == 64.0


def test_a_row_may_not_narrow_what_it_sums() -> None:
    row = "x: full | full | full fp32, pending(shard, replica) | full fp32"

    def rank_main(comm: Comm) -> None:
        model = net().double()
        Engine(model, comm, strategy=row, optimizer=adam(model), loss_fn=loss_sum, count_fn=len)

    with pytest.raises(ValueError, match="fewer bits"):
        run(Mesh(), rank_main, deadline=20)


class Kinds(nn.Module):
    """A real weight, a complex one, and a frozen list of indices, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.kept = nn.Parameter(torch.tensor([0, 3, 2, 5]), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x_BC: Tensor) -> Tensor:
        return (self.first(x_BC)[:, self.kept].to(self.turn.dtype) @ self.turn).abs()


@pytest.mark.parametrize("row", ["ddp", "zero2", "zero3"])
def test_bytes_of_integers_and_complex_numbers_are_predicted_under_dtypes(row: str) -> None:
    torch.manual_seed(0)
    models = [Kinds() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    strategy = TABLE[row].mixed("bf16")

    def rank_main(comm: Comm) -> None:
        model = models[comm.rank]
        engine = Engine(
            model,
            comm,
            strategy=strategy,
            optimizer=adam(model),
            loss_fn=lambda m, x: m(x.to(BF16)).square().sum(),
            count_fn=len,
        )
        comm.ledger.clear()
        engine.step(batches(0, comm.rank, 1))
        sent = [e for e in comm.ledger.entries if e.note.phase != "setup"]
        assert not differences(predict_step(engine.placed.layouts(), comm.mesh, strategy, 1, comm.rank), sent)
        ahead, kept = held(engine.placed.layouts(), comm.mesh, strategy, comm.rank, 2), engine.placed.bytes_held()
        assert (kept["params"], kept["grads"], kept["optimizer"]) == (ahead.params, ahead.grads, ahead.optimizer)

    run(Mesh(shard=2), rank_main, deadline=20)
