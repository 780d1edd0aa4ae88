"""What a review found wrong with pipelines once: each a way to hang, to be silently wrong, or to be told an untruth."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import tensor_models
import torch
from engine_cases import Batch, batches, distinct, loss_sum
from pipeline_cases import Chain, build, chain, engine_on, linear, on, refused, same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from plait.comm import Comm
from plait.comm.thread import ThreadComm
from plait.engine.unit import Unit

# ---- lengths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(7, 8, 7), (8, 7, 8), (5, 1, 6)], ids=str)
@pytest.mark.parametrize("ways", [2, 3])
def test_sequence_parallelism_in_stages_with_batches_of_several_lengths(ways: int, lengths: tuple[int, ...]) -> None:
    """The parts of 7 and of 8 steps are equally long on some ranks, and not on others."""
    template = tensor_models.model(dropout=0.0)
    data = [tensor_models.token_batches(1, samples=3, length=length)[0] for length in lengths]
    names = ["embed", "blocks.0", "blocks.1", "norm", "out"]

    def body(comm: Comm) -> list[float]:
        mine: Any = copy.deepcopy(template)
        mine.pipeline_links = lambda: names
        engine = engine_on(mine, comm, sequence_parallel=comm.mesh.tensor > 1)
        first = [engine.step([batch]).loss for batch in data]
        return [*first, engine.step(data).loss]

    (wanted,) = on("pipe=1", body)
    for losses in on(f"pipe=2 tensor={ways}", body, deadline=5):
        assert losses == pytest.approx(wanted, abs=1e-12)


# ---- losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2"), ("zero3", "pipe=2 shard=2")])
@pytest.mark.parametrize("start", [0, 1, 4])
def test_a_regulariser_that_begins_later_is_refused_when_it_does(start: int, row: str, mesh: str) -> None:
    """Microbatches of the first step, and of the second."""

    def body(comm: Comm) -> None:
        calls = 0

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            nonlocal calls
            calls += 1
            value = loss_sum(model, batch)
            return value if calls <= start else value + sum(p.square().sum() for p in model.parameters())

        engine = build(chain(linear(), linear()), comm, strategy=row, loss_fn=loss)
        for batch in batches(2, samples=12):
            step(engine, batch, 3)

    with pytest.raises(ValueError, match=r"loss_fn reads a parameter by '.*' outside of the model's call|is used by"):
        on(mesh, body)


# ---- the model's own things -----------------------------------------------------------------------------------


class Counted(Chain):
    """Counts its forwards in a buffer of its own."""

    calls: Tensor

    def __init__(self, *links: nn.Module) -> None:
        super().__init__(*links)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("order", ["1f1b", "zbv", "interleaved"])
def test_a_buffer_of_the_model_counts_a_microbatch_once(order: str) -> None:
    template = distinct(Counted(*(linear() for _ in range(4))))

    def body(comm: Comm) -> int:
        engine = build(template, comm, schedule=order)
        for batch in batches(2):
            step(engine, batch, 3)
        return int(engine.full_state_dict()["calls"])

    assert on("pipe=2", body) == [6, 6]


class Listed(Chain):
    """Runs its links from a second place: a plain list, a tuple, a dict, or inside of one another."""

    def __init__(self, kind: str, *links: nn.Module) -> None:
        super().__init__(*links)
        made: dict[str, Any] = {
            "list": list(links),
            "tuple": tuple(links),
            "dict": {str(i): link for i, link in enumerate(links)},
            "nested": {"all": [tuple(links)]},
        }
        self.order = made[kind]

    def forward(self, x: Tensor) -> Tensor:
        order = self.order
        if isinstance(order, dict):
            order = order["all"][0] if "all" in order else list(order.values())
        for link in order:
            x = torch.tanh(link(x))
        return x


@pytest.mark.parametrize("order", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "nested"])
def test_links_that_the_model_keeps_a_second_time(kind: str, order: str) -> None:
    same(distinct(Listed(kind, *(linear() for _ in range(4)))), schedule=order)


# ---- hooks, patches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["1f1b", "zbv", "interleaved"])
@pytest.mark.parametrize("kind", ["register_post_accumulate_grad_hook", "register_hook"])
def test_a_users_hook_on_a_tied_weight(kind: str, order: str) -> None:
    """It fires once for each stage that uses the weight and microbatch, and nothing else changes."""
    first, last = linear(), linear()
    last.weight = first.weight
    template = chain(first, linear(), linear(), last)
    data = batches(2)

    def body(comm: Comm) -> tuple[int, dict[str, Tensor]]:
        model, calls = copy.deepcopy(template), 0

        def hook(_: Tensor) -> None:
            nonlocal calls
            calls += 1

        getattr(model.get_parameter("l0.weight"), kind)(hook)
        engine = engine_on(model, comm, schedule=order)
        for batch in data:
            step(engine, batch, 3)
        return calls, engine.full_state_dict()

    truth = cases.plain(template, data)
    found = on("pipe=2", body)
    assert sum(calls for calls, _ in found) == 2 * 3 * 2
    for _, state in found:
        assert all(cases.close(state[name], truth.state[name]) for name in truth.state)


@pytest.mark.parametrize("order", ["1f1b", "interleaved"])
def test_links_whose_forward_is_patched(order: str) -> None:
    template, data = chain(*(linear() for _ in range(4))), batches(2)

    def body(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(template)
        for link in model.children():
            link.forward = partial(lambda forward, x: forward(x) * 1.0, link.forward)
        engine = engine_on(model, comm, schedule=order)
        for batch in data:
            step(engine, batch, 3)
        return engine.full_state_dict()

    truth = cases.plain(template, data)
    for state in on("pipe=2", body):
        assert all(cases.close(state[name], truth.state[name]) for name in truth.state)


class InGroups(Chain):
    """Recomputes its links two by two; ``checkpoint_sequential`` all but the last two."""

    def __init__(self, last: bool) -> None:
        super().__init__(*(linear() for _ in range(4)))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        if not self.last:
            out: Tensor = checkpoint_sequential(self.links, 2, x, use_reentrant=False)
            return out
        for first, second in (self.links[:2], self.links[2:]):
            x = checkpoint(lambda y, f=first, s=second: s(torch.tanh(f(y))), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("split", [(2, 2), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_groups_of_links_that_are_recomputed_together(last: bool, split: tuple[int, int]) -> None:
    """Right where a group is of one stage; else the words say what is wrong and what to do."""
    model = distinct(InGroups(last))
    if split == (2, 2) or (split == (3, 1) and not last):
        same(model, split=split)
    else:
        refused("a checkpoint around several links of the pipeline holds links of two stages", model, split=split)


# ---- what is held ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [None, 0, 1, 2])
@pytest.mark.parametrize("row", ["zero3", "zero3_keep", "hpz"])
@pytest.mark.parametrize("order", ["zbv", "interleaved"])
def test_the_peak_of_gathered_parameters_is_that_of_all_stages_of_a_rank(
    order: str, row: str, hold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a sum over all units of the rank whenever one has been filled, or is about to be."""
    gather = Unit.gather

    def watched(unit: Unit, *arguments: Any) -> None:
        gather(unit, *arguments)
        unit.comm.note_bytes()  # type: ignore[attr-defined]

    monkeypatch.setattr(Unit, "gather", watched)

    def body(comm: Comm) -> tuple[int, int]:
        most, units = 0, list[Unit]()

        def note() -> None:
            nonlocal most
            most = max(most, sum(u.bytes_full for u in units if u.split and (u.filled or u.works is not None)))

        comm.note_bytes = note  # type: ignore[attr-defined]
        engine = build(chain(*(linear() for _ in range(4))), comm, strategy=row, schedule=order, hold=hold)
        units += engine.units
        step(engine, batches(1)[0], 4)
        return engine.bytes_held()["gathered_peak"], most

    for told, most in on("pipe=2 shard=2", body):
        assert told == most > 0


# ---- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["1f1b", "zbv", "interleaved"])
def test_both_sides_of_a_message_know_whether_its_shape_is_agreed_on(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over batches of two sizes, the second of which comes late: a header that nobody takes, or that never comes."""
    sent: dict[tuple[int, int], list[bool]] = defaultdict(list)
    asked: dict[tuple[int, int], list[bool]] = defaultdict(list)
    send, recv, recv_new = ThreadComm.send, ThreadComm.recv, ThreadComm.recv_new

    def sending(comm: Comm, tensor: Tensor, dst: int, *rest: Any, agreed: bool = False) -> Any:
        sent[comm.rank, dst].append(agreed)
        return send(comm, tensor, dst, *rest, agreed=agreed)

    def receiving(comm: Comm, tensor: Tensor, src: int, *rest: Any, agreed: bool = False) -> Any:
        asked[src, comm.rank].append(agreed)
        return recv(comm, tensor, src, *rest, agreed=agreed)

    def learning(comm: Comm, src: int, *rest: Any) -> Any:
        asked[src, comm.rank].append(False)
        return recv_new(comm, src, *rest)

    monkeypatch.setattr(ThreadComm, "send", sending)
    monkeypatch.setattr(ThreadComm, "recv", receiving)
    monkeypatch.setattr(ThreadComm, "recv_new", learning)

    def body(comm: Comm) -> None:
        engine = build(chain(*(linear() for _ in range(4))), comm, schedule=order)
        for samples in (8, 12, 11, 12):  # microbatches of 2, of 3, of both
            step(engine, batches(1, samples=samples)[0], 4)
            engine.evaluate([batches(1, samples=4)[0]])

    on("pipe=2", body)
    assert sent == asked and {True, False} == {flag for flags in sent.values() for flag in flags}


# ---- words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "links, named", [(12, ", ".join(f"l{i}" for i in range(12))), (13, r"l0, l1, l2, \.\.\., l11, l12")]
)
def test_a_split_that_does_not_fit_names_the_links_of_a_long_model_by_its_ends(links: int, named: str) -> None:
    model = chain(*(nn.Tanh() for _ in range(links - 1)), linear())
    refused(f"but the model has {links}.*; the links are {named}\n", model, split=(1, 1))
