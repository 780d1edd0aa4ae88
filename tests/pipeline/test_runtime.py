"""The pipeline runtime on small chains: every order and row against plain autograd, state, memory, sharing."""

import gc
from collections.abc import Iterator
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import Made, batches, deal
from pipeline_cases import Chain, as_one_stage, build, chain, linear, on, same, step, tied
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from plait.comm import Comm
from plait.schedule.actions import parse_schedule
from plait.schedule.check import peaks
from plait.schedule.pipeline import Pipeline
from plait.step import Engine
from plait.zero.unit import State, Unit

SPLIT = ("zb_h1", "zb_h2", "zbv")
"""Orders whose backwards are in two parts."""


def six() -> Chain:
    return chain(linear(), nn.Tanh(), cases.Block(), nn.LayerNorm(5), cases.Block(), linear())


# ---- the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
        "1F0 1B0 1F1 1B1\n0F0 0F1 0B0 0B1",
        "0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0",
        "0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1B0 1F1 1I1 1W1",
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        "0F0 0F1 0B0 0B1 0REDUCE\n1F0 1B0 1F1 1B1 1REDUCE",
        "0F0 0F1 0B0 0B1 0UPDATE\n1F0 1B0 1F1 1B1 1UPDATE",
        "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1",
    ],
)
@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2 shard=2")])
def test_a_schedule_written_by_hand(text: str, row: str, mesh: str) -> None:
    same(six(), mesh, row, schedule=parse_schedule(text), microbatches=2)


def test_two_stages_on_one_rank_without_a_pipe_axis() -> None:
    same(six(), "shard=2", "zero3", schedule=parse_schedule("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1"), microbatches=2)


@pytest.mark.parametrize("order", ["1f1b", "zb_h1", "interleaved"])
def test_each_step_may_bring_another_number_of_microbatches(order: str) -> None:
    """Ragged, more than samples (empty ones), fewer than ranks."""
    numbers, data = (4, 1, 2, 9, 4), batches(5, samples=7)

    def body(comm: Comm) -> list[float]:
        engine = build(six(), comm, schedule=order if comm.mesh.pipe > 1 else None)
        return [step(engine, batch, n).loss for n, batch in zip(numbers, data, strict=True)]

    truth = torch.tensor(on("pipe=1", body)[0])
    for losses in on("pipe=3", body):
        assert cases.close(torch.tensor(losses), truth, 1e-12)


# ---- tied weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["element", "tensor"])
@pytest.mark.parametrize("mesh, row", [("pipe=3", "ddp"), ("pipe=3 shard=2", "zero3"), ("pipe=3 replica=2", "zero1")])
@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
def test_a_weight_on_three_stages(order: str, mesh: str, row: str, cut: str) -> None:
    same(tied(3), mesh, row, schedule=order, cut=cut, clip=0.2)


def turned(weight: nn.Parameter) -> nn.Module:
    """x @ weight, of a weight that another link multiplies from the other side."""
    return Made(lambda m, x: x @ m.weight, weight=weight)


@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_used_in_two_ways(frozen: bool, order: str) -> None:
    first = linear()
    model = chain(first, nn.Tanh(), linear(), turned(first.weight))
    first.weight.requires_grad_(not frozen)
    same(model, schedule=order, clip=0.2)


# ---- norms and state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
def test_ranks_without_parameters_report_the_same_norm(order: str) -> None:
    ranks = same(chain(nn.Tanh(), linear(), linear()), split=(1, 2), clip=0.1, schedule=order)
    assert ranks[0].norms == ranks[1].norms


# ---- dropout and recomputation --------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Its forward runs again in backward, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = linear(5, 7), nn.Dropout(0.4), linear(7, 5)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2 shard=2")])
@pytest.mark.parametrize("order", ["gpipe", *SPLIT, "dualpipe_v"])
def test_dropout_is_the_same_on_any_pipeline_also_where_it_is_drawn_again(order: str, row: str, mesh: str) -> None:
    model = chain(linear(), Recomputed(), nn.Dropout(0.3), Recomputed(), Recomputed(), linear())
    as_one_stage(model, mesh, strategy=row, seed=5, schedule=order)


class Drops(nn.Module):
    """Draws twice in a call, once by a module that others may call too."""

    def __init__(self, drop: nn.Module, *, contains: bool) -> None:
        super().__init__()
        self.linear, self.calls = linear(), [drop]
        if contains:
            self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(self.calls[0](x), 0.2, self.training))


@pytest.mark.parametrize("sharing", ["one dropout", "a dropout that blocks only refer to", "one block"])
@pytest.mark.parametrize("order", ["1f1b", "zbv", "dualpipe_v"])
def test_a_draw_that_stages_share_is_that_of_one_process(order: str, sharing: str) -> None:
    drop = nn.Dropout(0.4)
    blocks = [Drops(drop, contains=sharing != "a dropout that blocks only refer to") for _ in range(4)]
    shared = blocks[:1] * 4 if sharing == "one block" else blocks
    as_one_stage(chain(linear(), *shared, nn.Sequential(drop, linear())), "pipe=2", schedule=order)


# ---- memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Whatever waits for the garbage collector is still there."""
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    """Notes what its links keep for backward: how much of it lives, at most and in the end."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, linear()
        self.seen: list[StorageWeakRef] = []
        self.peak = 0

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.seen)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.sin(x)
        out: Tensor = self.linear(inside)
        noted = {"input": x, "saved": inside, "output": out}[self.what]
        self.seen.append(StorageWeakRef(noted.untyped_storage()))
        self.peak = max(self.peak, self.alive())
        return out


def watched(what: str, order: str, mesh: str, row: str) -> list[Any]:
    def body(comm: Comm) -> Any:
        model = cases.distinct(nn.Sequential(*(Watched(what) for _ in range(3))))
        engine = build(model, comm, strategy=row, schedule=order)
        for batch in batches(2):
            parts = deal(batch, comm.mesh, comm.rank, 6)
            engine.step(parts)
            del parts
        (stage,) = engine.placed.stages.values()
        (link,) = [m for m in stage.model.modules() if isinstance(m, Watched)]
        p2p = engine.placed.p2p
        left = [len(stage.flights), len(p2p._made), len(p2p._coming), len(p2p._going)]
        return comm.mesh.coordinates(comm.rank)["pipe"], link.peak, link.alive(), left, stage.unsharding.num_flying

    return on(mesh, body)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=3"), ("zero3", "pipe=3 shard=2")])
@pytest.mark.parametrize("order", ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_activations_live_as_long_as_the_schedule_says(order: str, row: str, mesh: str) -> None:
    wanted = peaks(Pipeline(order, 3).written(6))
    for place, peak, alive, left, flying in watched("saved", order, mesh, row):
        assert peak == wanted[place], f"stage {place} keeps {peak} microbatches, {wanted[place]} are in flight"
        assert alive == 0 and not any(left) and flying == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
def test_what_a_stage_received_goes_with_its_backward(order: str) -> None:
    wanted = peaks(Pipeline("1f1b", 3).written(6))
    for place, peak, alive, *_ in watched("input", order, "pipe=3", "ddp"):
        if place > 0:  # the first stage's are the caller's
            assert alive == 0
            assert peak <= wanted[place] + 1


@pytest.mark.usefixtures("no_collector")
def test_what_a_stage_hands_over_is_gone_when_it_is_sent() -> None:
    for place, peak, alive, *_ in watched("output", "gpipe", "pipe=3", "ddp"):
        assert alive == 0
        assert place == 2 or peak == 1, f"stage {place} keeps {peak} outputs of 6"


@each_rank("pipe=2")
def test_the_model_that_the_user_holds_is_refused_and_engine_backward_too(comm: Comm) -> None:
    engine = build(six(), comm)
    with pytest.raises(ValueError, match="cut in stages"):
        engine.model(batches(1)[0]["x"])
    with pytest.raises(ValueError, match="full_state_dict"):
        engine.model.state_dict()
    with pytest.raises(ValueError, match=r"use engine\.step"):
        engine.backward(torch.ones((), requires_grad=True), 1)
    assert isinstance(engine, Engine) and step(engine, batches(1)[0]).step == 0


@pytest.mark.parametrize("hold", [None, 0, 1, 2])
@pytest.mark.parametrize("row", ["zero3", "zero3_keep", "hpz"])
@pytest.mark.parametrize("order", ["zbv", "interleaved"])
def test_the_peak_of_gathered_parameters_is_that_of_all_stages_of_a_rank(
    order: str, row: str, hold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a sum over all units of the rank whenever one has been filled, or is about to be."""
    unshard = Unit.unshard

    def watched(unit: Unit, *arguments: Any) -> None:
        unshard(unit, *arguments)
        unit.comm.note_bytes()

    monkeypatch.setattr(Unit, "unshard", watched)

    def body(comm: Comm) -> None:
        sizes, units = list[int](), list[Unit]()
        filled = (State.UNSHARDING, State.UNSHARDED)
        comm.note_bytes = lambda: sizes.append(sum(u.bytes_full for u in units if u.state in filled))
        engine = build(chain(*(linear() for _ in range(4))), comm, strategy=row, schedule=order, hold=hold)
        units += engine.placed.units
        step(engine, batches(1)[0], 4)
        assert engine.placed.bytes_held()["gathered_peak"] == max(sizes) > 0

    on("pipe=2 shard=2", body)
