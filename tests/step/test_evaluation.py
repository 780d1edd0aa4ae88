"""Evaluations: the single process's loss under every layout, and a training that does not know of them."""

import copy
import math
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import tensor_models
import torch
from each_rank import each_rank
from engine_cases import ROWS, SPLIT_ROWS, Batch, batches, count, deal, loss_sum
from pipeline_cases import build, chain, engine_on, linear, on, step
from torch import Tensor, nn

from plait.comm import Comm
from plait.forward.parameter import AtRest
from plait.step import Engine, Evaluation, StepResult
from plait.table.mesh import Mesh

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one stage": ("replica=2 shard=2", {}),
    "zbv": ("pipe=2 shard=2", {"schedule": "zbv"}),
    "interleaved, units by themselves": ("pipe=2 shard=2", {"schedule": "interleaved", "hold": None}),
    "1f1b": ("pipe=2 replica=2 shard=2", {"schedule": "1f1b"}),
    "zbv, two held": ("pipe=2 shard=2", {"schedule": "zbv", "hold": 2}),
}
EVERY = [(row, layout) for row in ROWS for layout in list(LAYOUTS)[:3]]
EVERY += [("hpz", "1f1b"), ("zero3", "zbv, two held"), ("zero3_keep", "zbv, two held")]


class Norm(nn.BatchNorm1d):
    """BatchNorm that may be given one sample, and none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 1 else x * self.weight + self.bias


def model() -> nn.Module:
    return chain(linear(), nn.Dropout(0.4), cases.Block(), nn.LayerNorm(5), nn.Dropout(0.2), cases.Block(), linear())


def wanted(whole: nn.Module, batch: Batch, mesh: Mesh, num: int) -> Evaluation:
    """One process on the same microbatches; their losses are added exactly."""
    whole.eval()
    ranks = [mesh.rank(pipe=0, replica=i, shard=j, tensor=0) for i in range(mesh.replica) for j in range(mesh.shard)]
    parts = [part for rank in ranks for part in deal(batch, mesh, rank, num)]
    with torch.no_grad():
        total = math.fsum(loss_sum(whole, part).item() for part in parts)
    return Evaluation(total / count(batch), count(batch))


def evaluate(engine: Engine, batch: Batch, num: int) -> Evaluation:
    return engine.evaluate(iter(deal(batch, engine.comm.mesh, engine.comm.rank, num)))


def loaded(template: nn.Module, engine: Engine) -> nn.Module:
    whole = copy.deepcopy(template)
    whole.load_state_dict(engine.full_state_dict())
    return whole


# ---- the number ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row, layout", EVERY)
def test_the_loss_is_the_single_processs_to_the_bit(row: str, layout: str) -> None:
    """Before the first step and between steps; more microbatches than samples, so that some are empty."""
    mesh, settings = LAYOUTS[layout]
    template, data = model(), batches(3)

    def body(comm: Comm) -> None:
        engine = build(template, comm, strategy=row, **settings)
        for batch, num in zip(data, (3, 5, 1), strict=True):
            assert evaluate(engine, batch, num) == wanted(loaded(template, engine), batch, comm.mesh, num)
            step(engine, batch)
            if row in SPLIT_ROWS:
                assert all(isinstance(p, AtRest) for s in engine.placed.stages.values() for p in s.model.parameters())

    on(mesh, body)


@pytest.mark.parametrize("mesh", ["tensor=3", "pipe=2 tensor=2", "pipe=2 shard=2 tensor=2"])
@pytest.mark.parametrize("sequence", [False, True])
@each_rank()
def test_tensor_and_sequence_parallelism(comm: Comm, sequence: bool) -> None:
    template = tensor_models.model()
    mine: Any = copy.deepcopy(template)
    mine.pipeline_links = lambda: ["embed", "blocks.0", "blocks.1", "norm", "out"]
    engine = engine_on(mine, comm, strategy="zero3", sequence_parallel=sequence)
    for batch in tensor_models.token_batches(2):
        due = loss_sum(loaded(template, engine).eval(), batch).item() / count(batch)
        assert evaluate(engine, batch, 3).loss == pytest.approx(due, abs=1e-12)
        step(engine, batch, 3)


# ---- the training does not know of it -------------------------------------------------------------------------


def train(comm: Comm, template: nn.Module, evaluations: bool, **settings: Any) -> Any:
    """Losses, state, and the ledger of the steps; evaluations bring batches of other sizes and shapes."""
    engine = build(template, comm, seed=3, clip=0.5, **settings)
    results: list[StepResult] = []
    bigger = batches(1, samples=17)

    def look(batch: Batch) -> None:
        if evaluations:
            last, steps = engine.last, engine.steps
            for brought, num in ((batch, 4), (bigger[0], 2)):
                assert math.isfinite(evaluate(engine, brought, num).loss)
            assert engine.last is last and engine.steps == steps

    for batch in batches(2):
        look(batch)
        results.append(step(engine, batch))
        look(batch)
    lines = [e for e in comm.ledger.entries if e.note.phase != "evaluate"]
    return results, lines, engine.full_state_dict(), [e for e in comm.ledger.entries if e.note.phase == "evaluate"]


@pytest.mark.parametrize("row, layout", EVERY)
def test_a_training_with_evaluations_is_the_one_without(row: str, layout: str) -> None:
    mesh, settings = LAYOUTS[layout]
    template = model()
    without = on(mesh, lambda comm: train(comm, template, False, strategy=row, **settings))
    with_them = on(mesh, lambda comm: train(comm, template, True, strategy=row, **settings))
    for (results, lines, state, none), (again, same_lines, same_state, some) in zip(without, with_them, strict=True):
        assert again == results
        assert all(torch.equal(same_state[name], state[name]) for name in state)
        assert not none and some
        # the order of gathers, and which messages had been agreed on, are the same; setup comes before the first step
        assert [e for e in same_lines if e.note.phase != "setup"] == [e for e in lines if e.note.phase != "setup"]


class Reversed(cases.Net):
    """Runs its blocks from behind where it is evaluated."""

    def through(self, x_BC: Tensor) -> Tensor:
        for block in list(self.blocks) if self.training else reversed(list(self.blocks)):
            x_BC = block(x_BC)
        return x_BC


def test_an_evaluation_in_another_order_leaves_the_steps_gathers_as_they_were() -> None:
    template = cases.distinct(Reversed(4))
    without = on("shard=2", lambda comm: train(comm, template, False, strategy="zero3", prefetch=2))
    with_them = on("shard=2", lambda comm: train(comm, template, True, strategy="zero3", prefetch=2))
    for (results, lines, *_), (again, same_lines, *_) in zip(without, with_them, strict=True):
        assert again == results and same_lines == lines


def reduce(engine: Engine, loss: Tensor, part: Batch) -> None:
    engine.backward(loss, count(part))
    engine.reduce(clip=1e9)


@each_rank("shard=2")
def test_a_loop_of_ones_own_goes_on_as_well(comm: Comm) -> None:
    template = model()
    losses = []
    for evaluations in (False, True):
        engine = build(template, comm, strategy="zero3", seed=2)
        found = []
        for batch in batches(3):
            (part,) = deal(batch, comm.mesh, comm.rank, 1)
            if evaluations:
                evaluate(engine, batch, 2)
            loss = loss_sum(engine.model, part)
            for then in (partial(reduce, engine, loss, part), engine.optimizer.step):
                if evaluations:
                    with pytest.raises(ValueError, match="in the middle of a step"):
                        evaluate(engine, batch, 2)
                then()
            found.append(engine.last)
        losses.append(found)
    assert losses[0] == losses[1]


# ---- modes and buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("mesh, order", [("shard=2", None), ("pipe=2", "1f1b"), ("pipe=2", "zbv")])
@each_rank()
def test_each_module_has_its_own_mode_again(comm: Comm, order: str | None, raises: bool) -> None:
    template = chain(linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.5), linear())
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        seen.extend(module.training for module in model.modules())
        if raises:
            raise ArithmeticError("of the user's own")
        return loss_sum(model, batch)

    engine = build(template, comm, loss_fn=loss, schedule=order)
    engine.model.get_submodule("l1").eval()
    modes = {name: module.training for name, module in engine.model.named_modules()}
    for stage in engine.placed.stages.values():
        stage.program.follow()
    parts = [{m: m.training for m in stage.model.modules()} for stage in engine.placed.stages.values()]
    if raises:
        with pytest.raises((ArithmeticError, RuntimeError)):  # RuntimeError: of who waits for what does not come
            evaluate(engine, batches(1)[0], 2)
    else:
        evaluate(engine, batches(1)[0], 2)
    assert not any(seen) and (seen or raises)
    assert {name: module.training for name, module in engine.model.named_modules()} == modes
    assert modes["l1"] is False and modes["l3"] is True
    assert [{m: m.training for m in stage.model.modules()} for stage in engine.placed.stages.values()] == parts


@pytest.mark.parametrize("mesh, order", [("replica=3", None), ("pipe=2 shard=2", "interleaved")])
def test_the_buffers_of_data_rank_0_are_evaluated_and_each_rank_keeps_its_own(mesh: str, order: str | None) -> None:
    template = chain(linear(), Norm(5), cases.Block(), Norm(5), linear())

    def body(comm: Comm) -> list[Tensor]:
        engine = build(template, comm, schedule=order)
        for batch in batches(2):
            step(engine, batch, 2)
        parts = [stage.model for stage in engine.placed.stages.values()]
        before = [buffer.clone() for part in parts for buffer in part.buffers()]
        batch = batches(3)[2]
        assert evaluate(engine, batch, 2) == wanted(loaded(template, engine), batch, comm.mesh, 2)
        after = [buffer for part in parts for buffer in part.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        return before

    found = on(mesh, body)
    assert any(not torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True)), "they saw different samples"


class Counting(nn.Module):
    """Counts its forwards in buffers, in place and by a new one."""

    calls: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = self.latest + 1
        return x


@each_rank("pipe=2")
def test_buffers_that_every_forward_writes_to_count_the_training_alone(comm: Comm) -> None:
    engine = build(chain(linear(), Counting(), linear()), comm)
    step(engine, batches(1)[0], 3)
    evaluate(engine, batches(1)[0], 4)
    state = engine.full_state_dict()
    assert state["l1.calls"] == 3 and state["l1.latest"][0] == 3


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "fix"), [("shard=2", "loop"), ("pipe=2", "Engine")])
def test_what_cannot_be_evaluated_is_refused_and_the_training_goes_on(mesh: str, fix: str) -> None:
    template, batch = model(), batches(1)[0]

    def body(comm: Comm) -> float:
        engine = build(template, comm)
        with pytest.raises(ValueError, match="no microbatch"):
            engine.evaluate([])
        with pytest.raises(ValueError, match="different numbers of microbatches"):
            evaluate(engine, batch, 2 + comm.rank)
        with pytest.raises(ValueError, match="no target in any rank's"):
            evaluate(engine, batch | {"mask": torch.zeros_like(batch["mask"])}, 2)
        if comm.mesh.pipe > 1:
            with pytest.raises(ValueError, match="different batches"):
                evaluate(engine, batch | {"x": batch["x"] + comm.rank}, 2)
        for missing in ("loss_fn", "count_fn"):
            with pytest.raises(ValueError, match=f"need loss_fn and count_fn.*{fix}$"):
                evaluate(build(template, comm, **{missing: None}), batch, 2)
        return step(engine, batch).loss

    assert on(mesh, body) == pytest.approx([on("shard=1", lambda c: step(build(template, c), batch).loss)[0]] * 2)


@each_rank("pipe=2")
def test_after_an_evaluation_that_failed_in_a_pipeline_nothing_more_is_made(comm: Comm) -> None:
    engine = build(model(), comm, loss_fn=lambda model, batch: 1 // 0)
    with pytest.raises((ArithmeticError, RuntimeError)):
        evaluate(engine, batches(1)[0], 2)
    for again in (evaluate, step):
        with pytest.raises(ValueError, match="failed inside a pipeline"):
            again(engine, batches(1)[0], 2)


@each_rank("shard=2")
def test_an_evaluation_that_failed_on_one_stage_leaves_the_training_as_it_was(comm: Comm) -> None:
    """Also where units were open, and others on their way."""
    template, data = model(), batches(2)
    results = []
    for fails in (False, True):
        engine = build(template, comm, strategy="zero3")
        if fails:
            engine.loss_fn = lambda model, batch: loss_sum(model, batch) / (1 // 0)
            with pytest.raises(ArithmeticError):
                evaluate(engine, data[0], 2)
            engine.loss_fn = loss_sum
        results.append([step(engine, batch) for batch in data])
    assert results[0] == results[1]
