"""NaN and inf: one rank's is everybody's, before anything is updated, and everybody can say whose it is."""

from __future__ import annotations

import copy
import math
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, deal, loss_sum
from loop_cases import LAYOUTS, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


class Spoil(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.value, None


def spoiled_loss(model: nn.Module, batch: cases.Batch) -> Tensor:
    """``batch["kind"]`` holds 0, or 1 for a bad loss, 2 for a bad gradient behind a finite loss; then its value."""
    kind, value = batch["kind"][0].tolist()
    out = model(batch["x"])
    out = Spoil.apply(out, value) if kind == 2 else out
    loss = (((out - 0.5) ** 2).flatten(1).sum(1) * batch["mask"]).sum()
    return loss * value if kind == 1 else loss


def full_batches() -> list[cases.Batch]:
    """Every sample counts, so that none is 0 * inf."""
    return [batch | {"mask": torch.ones_like(batch["mask"])} for batch in batches(3)]


def spoiled(parts: list[cases.Batch], microbatch: int, kind: int, value: float) -> list[cases.Batch]:
    for m, part in enumerate(parts):
        bad = [float(kind), value] if m == microbatch else [0.0, 0.0]
        part["kind"] = torch.tensor([bad] * len(part["x"]), dtype=torch.float64)
    return parts


def trained(where: str, kind: int, value: float, nonfinite: str, step: int = 1) -> list[Any]:
    """Three steps, of which one is bad on the last data rank, in microbatch 1; what was raised, and what is left."""
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        model = cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))
        optimizer = adamw(model.parameters())
        engine = Engine(
            model,
            comm,
            strategy=row,
            optimizer=optimizer,
            loss_fn=spoiled_loss,
            count_fn=count,
            nonfinite=nonfinite,
            clip=0.5 if where in ("ddp", "hsdp") else None,
        )
        raised, results = "", []
        for number, batch in enumerate(full_batches()):
            bad = number == step and comm.mesh.data_rank(comm.rank) == comm.mesh.data_size - 1
            parts = spoiled(deal(batch, comm.mesh, comm.rank, 2), 1 if bad else -1, kind, value)
            before = engine.full_state_dict() if number == step else {}
            try:
                results.append(engine.step(parts))
            except FloatingPointError as error:
                raised = str(error)
            if number == step:
                after = engine.full_state_dict()
                assert all(torch.equal(before[name], after[name]) for name in before)
                assert {float(s["step"]) for s in optimizer.state.values()} <= {float(step)}
        return raised, results, engine.full_state_dict(), engine.steps

    return run(mesh, body, deadline=30)


def without(batch: int, where: str) -> dict[str, Tensor]:
    """The run that never saw the bad batch."""
    data = [b for i, b in enumerate(full_batches()) if i != batch]
    template = cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))
    clip = 0.5 if where in ("ddp", "hsdp") else None
    return cases.plain(template, data, clip=clip, loss=loss_sum).state


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("where", LAYOUTS)
def test_every_rank_raises_and_names_whose_it_is_and_nothing_has_changed(where: str, kind: int, value: float) -> None:
    ranks = trained(where, kind, value, "raise")
    culprit = layout(where)[0].size - 1
    for raised, results, state, steps in ranks:
        assert raised.startswith("step 1 (counted from 0) is not finite: ")
        if kind == 1:
            assert f"the loss of microbatch 1 on rank {culprit} is {value}" in raised
        else:
            assert "loss of microbatch" not in raised
            assert f"in microbatch 1 on rank {culprit}" in raised and "a gradient in the unit of '" in raised
        assert "microbatch 0" not in raised, "the first microbatch was good"
        assert len(results) == 2 and steps == 2
        assert all(cases.close(state[name], wanted) for name, wanted in without(1, where).items())


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("where", LAYOUTS)
def test_a_skipped_step_is_as_if_its_batch_had_never_been(where: str, kind: int) -> None:
    for raised, results, state, steps in trained(where, kind, math.nan, "skip"):
        assert (raised, steps) == ("", 3), "the step's number is used up, as its batch is"
        assert [r.made for r in results] == [True, False, True]
        assert results[1].grad_norm is None and math.isfinite(results[2].loss)
        assert all(cases.close(state[name], wanted) for name, wanted in without(1, where).items())


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "hsdp", "psdp"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_loop_of_ones_own(row: str, nonfinite: str) -> None:
    template = cases.net()

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, nonfinite=nonfinite)
        raised = ""
        for number, batch in enumerate(full_batches()):
            for m, part in enumerate(deal(batch, comm.mesh, comm.rank, 2)):
                loss = loss_sum(model, part)
                loss = loss * math.inf if (number, m, comm.rank) == (1, 1, 2) else loss
                engine.backward(loss, count(part))
            try:
                optimizer.step()
            except FloatingPointError as error:
                raised = str(error)
        return raised, engine.steps, engine.full_state_dict()

    data = full_batches()[::2]
    truth = cases.plain(template, data)
    for raised, steps, state in run(Mesh(replica=2, shard=2), body, deadline=20):
        assert steps == (2 if nonfinite == "raise" else 3)
        assert ("the loss of microbatch 1 on rank 2 is inf" in raised) == (nonfinite == "raise")
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


def test_a_parameter_without_gradient_after_a_bad_step_is_still_good() -> None:
    """Its place in the buffer holds the bad step's number, which nobody may read again."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

        def forward(self, x: Tensor, b: bool) -> Tensor:
            return self.b(x) if b else self.a(x)

    def body(comm: Comm, row: str) -> list[bool]:
        model = cases.distinct(Either())
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, units=[], nonfinite="skip")
        made = []
        for number in range(3):
            factor = math.nan if number == 0 else 1.0
            engine.backward(model(torch.ones(2, 5, dtype=torch.float64), b=number == 0).sum() * factor, 2)
            optimizer.step()
            made.append(engine.last.made)
        return made

    for row in ("ddp", "zero1", "zero2", "zero3"):
        assert run(Mesh(shard=2), lambda comm, row=row: body(comm, row), deadline=20) == [[False, True, True]] * 2
