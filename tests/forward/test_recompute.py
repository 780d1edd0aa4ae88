"""A forward run a second time, or saved on the CPU: the bits of the run that keeps activations, or an error."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from engine_cases import WIDTH, Batch, Made, batches, distinct, train
from recompute_cases import Attends, Drops, Recurrent, bits, messages, model_of, unchanged
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import plait
from plait.comm import Comm, run
from plait.forward.recompute import blocks_of
from plait.pipeline.pipeline_stage import PipelineStage
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count
from plait.step import Engine
from plait.table.mesh import Mesh

# ---- the same bits ----------------------------------------------------------------------------------------------


def saving(inner: nn.Module) -> nn.Module:
    """A checkpoint of the model's own inside of the block, between draws."""
    run = lambda m, x: F.dropout(checkpoint(m.inner, F.dropout(x, 0.1), use_reentrant=False), 0.2)  # noqa: E731
    return Made(run, inner=inner)


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
    blocks = [Attends(), Drops()] if outside else [saving(Attends()), saving(Drops()), Drops()]
    unchanged(model_of(*blocks, kind=Around if outside else cases.Net), row=row, recompute=recompute)


def tupled(m: Any, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A tuple in, a keyword, a tuple and a dict out."""
    x, other = pair
    return x + m.down(torch.tanh(m.up(x * scale))), {"other": other * 2 + x}


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


def raw() -> nn.Module:
    """No child, and a forward that keeps more than its input."""
    a, b = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(2))
    return Made(lambda m, x_BC: x_BC + torch.tanh(x_BC @ m.a) @ m.b.t(), a=a, b=b)


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep", "hpz"])
def test_models_of_many_kinds(row: str) -> None:
    mesh = "replica=2 shard=2" if row == "hpz" else "shard=2"
    pairs = [Made(tupled, up=nn.Linear(WIDTH, 11), down=nn.Linear(11, WIDTH)) for _ in range(2)]
    unchanged(model_of(*pairs, kind=Tuples), mesh, row)
    unchanged(model_of(Penalised(), Penalised()), mesh, row, loss=with_penalties)
    unchanged(model_of(cases.Block(), kind=Recurrent), mesh, row)
    unchanged(model_of(raw(), raw()), mesh, row)
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
    """Counts its forwards."""

    forwards = 0

    def forward(self, x_BC: Tensor) -> Tensor:
        self.forwards += 1
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


@each_rank("shard=2")
def test_nothing_runs_twice_where_no_gradient_is_asked_for(comm: Comm) -> None:
    block = Counted()
    model = distinct(nn.Sequential(block, nn.Linear(WIDTH, 3)))
    Engine(model, comm, recompute="full")
    with torch.no_grad():
        model(batches()[0]["x"])
    assert block.forwards == 1


def ends() -> nn.Module:
    """Its last product is gathered, and nothing after it keeps anything."""
    return Made(lambda m, x: x + m.out(torch.tanh(m.up(x))), up=nn.Linear(WIDTH, 8), out=nn.Linear(8, WIDTH))


def test_messages_of_a_block_are_sent_twice_to_its_very_end() -> None:
    plan = {"blocks.*.up": "gathered", "blocks.*.out": "gathered"}
    found = []
    for mode in ("full", None):
        ranks = train(
            model_of(ends(), ends()), "tensor=2", "ddp", batches(), look=messages, tensor_plan=plan, recompute=mode
        )
        found.append(ranks)
    bits(*found)
    for again, once in zip(*found, strict=True):
        forward = [message for message in once.seen if "tensor forward" in message]
        assert len(forward) == 2 * 2 * 2
        assert again.seen == sorted([*once.seen, *forward])


# ---- which blocks -------------------------------------------------------------------------------------------------


def test_blocks_are_the_outermost_units_inside_a_list() -> None:
    model = model_of(Drops(), Drops(), raw(), nn.Linear(WIDTH, WIDTH))
    units = ["", "first", "blocks.0", "blocks.0.up", "blocks.1.up", "blocks.2", "blocks.3", "head"]
    assert blocks_of(model, units) == ["blocks.0", "blocks.2"]
    whole = nn.Sequential(nn.Embedding(3, WIDTH), Drops(), nn.Linear(WIDTH, 3))
    assert blocks_of(whole, ["", "0", "1", "2"]) == ["1"]


def train_gpt(comm: plait.Comm, settings: dict[str, Any], *, moves: bool) -> tuple[list[float], dict[str, Tensor]]:
    with plait.empty_parameters():
        model = GPT(
            GPTConfig(vocabulary=11, num_layers=3, width=8, num_heads=2, num_kv_heads=2, max_length=8, dropout=0.1)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = plait.Engine(
        model, comm, optimizer=optimizer, loss_fn=loss_sum, count_fn=token_count, clip=0.5, **settings
    )
    draw = torch.Generator().manual_seed(comm.data_rank)
    losses = []
    for _ in range(3):
        parts = [torch.randint(11, (2, 2, 8), generator=draw) for _ in range(2)]
        with save_on_cpu() if moves else nullcontext():
            losses.append(engine.step([{"tokens": tokens, "targets": targets} for tokens, targets in parts]).loss)
    return losses, engine.full_state_dict()


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("shard=2", {"strategy": "ddp"}),
        ("shard=2", {"strategy": "zero3", "recompute": "full"}),
        ("pipe=2 shard=2", {"strategy": "zero3", "schedule": "1f1b"}),
    ],
)
def test_saving_on_the_cpu_changes_no_bit(mesh: str, settings: dict[str, Any]) -> None:
    right, moved = (plait.run_threads(mesh, lambda c, m=m: train_gpt(c, settings, moves=m)) for m in (False, True))
    for (losses, state), (due, values) in zip(moved, right, strict=True):
        assert losses == due and all(torch.equal(state[name], value) for name, value in values.items())
