"""A forward run a second time instead of keeping its activations: the bits of the run that keeps them, or an error."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import WIDTH, Batch, batches, distinct, train
from recompute_cases import Attends, Drops, Recurrent, bits, messages, model_of, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.comm import Comm, run
from plait.forward.recompute import blocks_of
from plait.pipeline.pipeline_stage import PipelineStage
from plait.step import Engine
from plait.table.mesh import Mesh

# ---- the same bits ----------------------------------------------------------------------------------------------


class Saving(nn.Module):
    """A checkpoint of the model's own inside of the block, between draws."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BC: Tensor) -> Tensor:
        out = checkpoint(self.inner, F.dropout(x_BC, 0.1), use_reentrant=False)
        return F.dropout(out, 0.2)


class Around(cases.Net):
    """Blocks in checkpoints of the model's own."""

    def through(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = checkpoint(block, x_BC, use_reentrant=False)
        return x_BC


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "around"])
def test_beside_checkpoints_of_the_models_own(outside: bool, recompute: str, row: str) -> None:
    blocks = [Attends(), Drops()] if outside else [Saving(Attends()), Saving(Drops()), Drops()]
    unchanged(model_of(*blocks, kind=Around if outside else cases.Net), row=row, recompute=recompute)


class Tupled(nn.Module):
    """A tuple in, a keyword, a tuple and a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, other = pair
        return x + self.down(torch.tanh(self.up(x * scale))), {"other": other * 2 + x}


class Tuples(cases.Net):
    def through(self, x_BC: Tensor) -> Tensor:
        other = x_BC.sin()
        for block in self.blocks:
            x_BC, found = block((x_BC, other), scale=x_BC.cos())
            other = found["other"]
        return x_BC + other


class Mixes(cases.Block):
    """Reads what containers hold now, at several depths, and notes that it ran in one of them."""

    def forward(self, earlier: list[Tensor], *, state: dict[str, Any]) -> Tensor:
        for note in state["notes"]:
            note.append(len(earlier))
        return super().forward(torch.stack(earlier).mean(0) * state["scales"][0])


class Lists(cases.Net):
    """Gives each block the containers that it goes on to change; ``alone``: to each its own."""

    alone = False

    def through(self, x_BC: Tensor) -> Tensor:
        earlier, scales, ran = [x_BC], [x_BC.cos()], [0]
        for block in self.blocks:
            state = {"scales": scales, "notes": (ran,)}
            given = ([*earlier], {**state, "scales": [*scales]}) if self.alone else (earlier, state)
            earlier.append(block(given[0], state=given[1]))
            scales[0] = scales[0] * 0.5
            state["scales"] = [x_BC]
        assert ran == [0, 1, 2, 3], "what a block writes is seen outside, and written once"
        return earlier[-1]


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_lists_and_dicts_that_are_changed_behind_a_block(row: str) -> None:
    """The block runs again with what they held."""
    model = model_of(Mixes(), Mixes(), Mixes(), kind=Lists)
    unchanged(model, row=row)
    alone = copy.deepcopy(model)
    alone.alone = True
    bits(train(model, "shard=2", row, batches(), recompute="full"), train(alone, "shard=2", row, batches()))


class Penalised(cases.Block):
    """Leaves a part of the loss beside its output: its backward runs again before that of the output."""

    def forward(self, x_BC: Tensor) -> Tensor:
        out = super().forward(x_BC)
        self.penalty = (torch.tanh(out) ** 2).sum() * 0.1
        return out


def with_penalties(model: Any, batch: Batch) -> Tensor:
    loss = cases.loss_sum(model, batch)
    for block in model.blocks:
        loss = loss + block.penalty
    return loss


class Raw(nn.Module):
    """No child, and a forward that keeps more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + torch.tanh(x_BC @ self.a) @ self.b.t()


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep", "hpz"])
def test_models_of_many_kinds(row: str) -> None:
    mesh = "replica=2 shard=2" if row == "hpz" else "shard=2"
    unchanged(model_of(Tupled(), Tupled(), kind=Tuples), mesh, row)
    unchanged(model_of(Penalised(), Penalised()), mesh, row, loss=with_penalties)
    unchanged(model_of(cases.Block(), kind=Recurrent), mesh, row)
    unchanged(model_of(Raw(), Raw()), mesh, row)
    of_the_batch = distinct(nn.Sequential(Drops(), Attends(), nn.Linear(WIDTH, 3)))  # which wants no gradient
    unchanged(of_the_batch, mesh, row)


@pytest.mark.parametrize("frozen", ["up", "down", "first", "blocks.1"])
@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_frozen_parameters(row: str, frozen: str) -> None:
    model = model_of(Drops(), Drops())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    unchanged(model, row=row)


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep"])
def test_units_inside_of_units(row: str) -> None:
    """Under ``zero3_keep`` parameters at rest before a block are whole after it; that is not a write."""
    units = ["blocks.0", "blocks.0.up", "blocks.1.down", "blocks.1.up"]
    unchanged(model_of(Drops(), Drops()), row=row, units=units)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("late", [False, True], ids=["one by one", "backwards later"])
def test_a_loop_of_ones_own(late: bool, recompute: str) -> None:
    """Also where a second forward comes before the first one's backward: each is recomputed with its own masks."""

    def body(comm: Comm, mode: Any) -> dict[str, Tensor]:
        model = model_of(Attends(), Drops())
        optimizer = cases.adamw(model.parameters())
        engine = Engine(model, comm, strategy="ddp", optimizer=optimizer, recompute=mode, seed=3)
        for batch in batches():
            mine = cases.deal(batch, comm.mesh, comm.rank, 2)
            losses = []
            for one in mine:
                losses.append(cases.loss_sum(model, one))
                if not late:
                    engine.backward(losses[-1], cases.count(one))
            for one, loss in zip(mine, losses, strict=True) if late else ():
                engine.backward(loss, cases.count(one))
            optimizer.step()
        return engine.full_state_dict()

    found, wanted = (run(Mesh(shard=2), partial(body, mode=mode), deadline=20) for mode in (recompute, None))
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ---- how often ----------------------------------------------------------------------------------------------------


class Counted(Drops):
    """Counts its forwards, in a list: a number would be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = [0]

    @property
    def forwards(self) -> int:
        return self.ran[0]

    def forward(self, x_BC: Tensor) -> Tensor:
        self.ran[0] += 1
        return super().forward(x_BC)


def test_a_block_runs_twice_and_the_second_time_in_the_input_part(monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = PipelineStage.weight

    def weight(self: PipelineStage, microbatch: int, *, last: bool) -> None:
        blocks = [m for m in self.model.modules() if isinstance(m, Counted)]
        before = [block.forwards for block in blocks]
        weigh(self, microbatch, last=last)
        assert [block.forwards for block in blocks] == before

    monkeypatch.setattr(PipelineStage, "weight", weight)

    def look(engine: Engine) -> list[int]:
        modules = [m for s in engine.placed.stages.values() for m in s.model.modules()]
        return [m.forwards for m in modules if isinstance(m, Counted)]

    model = distinct(nn.Sequential(Counted(), Counted(), Counted(), nn.Linear(WIDTH, 3)))
    for schedule in ("1f1b", "zb_h1", "zbv"):
        for mode, times in (("full", 2), (None, 1)):
            ranks = train(
                model, "pipe=2", "ddp", batches(1), microbatches=3, look=look, schedule=schedule, recompute=mode
            )
            assert sorted(n for rank in ranks for n in rank.seen) == [3 * times] * 3


def test_nothing_runs_twice_where_no_gradient_is_asked_for() -> None:
    def body(comm: Comm) -> int:
        block = Counted()
        model = distinct(nn.Sequential(block, nn.Linear(WIDTH, 3)))
        Engine(model, comm, recompute="full")
        with torch.no_grad():
            model(batches()[0]["x"])
        return block.forwards

    assert run(Mesh(shard=2), body, deadline=20) == [1, 1]


class Ends(nn.Module):
    """Its last product is gathered, and nothing after it keeps anything."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + self.out(torch.tanh(self.up(x_BC)))


def test_messages_of_a_block_are_sent_twice_to_its_very_end() -> None:
    plan = {"blocks.*.up": "gathered", "blocks.*.out": "gathered"}
    found = []
    for mode in ("full", None):
        ranks = train(
            model_of(Ends(), Ends()), "tensor=2", "ddp", batches(), look=messages, tensor_plan=plan, recompute=mode
        )
        found.append(ranks)
    bits(*found)
    for again, once in zip(*found, strict=True):
        forward = [message for message in once.seen if "tensor forward" in message]
        assert len(forward) == 2 * 2 * 2
        assert again.seen == sorted([*once.seen, *forward])


# ---- which blocks -------------------------------------------------------------------------------------------------


def test_blocks_are_the_outermost_units_inside_a_list() -> None:
    model = model_of(Drops(), Drops(), Raw(), nn.Linear(WIDTH, WIDTH))
    units = ["", "first", "blocks.0", "blocks.0.up", "blocks.1.up", "blocks.2", "blocks.3", "head"]
    assert blocks_of(model, units) == ["blocks.0", "blocks.2"]
    whole = nn.Sequential(nn.Embedding(3, WIDTH), Drops(), nn.Linear(WIDTH, 3))
    assert blocks_of(whole, ["", "0", "1", "2"]) == ["1"]
