"""The engines by hand under spmd_types, a checker of types: which of their bugs it refuses.

What it is told, as its guide asks: what enters is *varying* (V), parameters are *replicated* (R), so that their
gradients are *partial* (P, by its own table), the loss of a rank is a part of a sum (V read as P), and the optimizer
wants whole gradients.  It follows the computation in a world of two that is not there, rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import silent_bug_jobs
import silent_bugs
import spmd_types as spmd
import spmd_types.checker
import torch.distributed as dist
from silent_bug_jobs import JOB, SAMPLES, Bug
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.referee.witness.engines import Driven, clip_by_norm
from plait.run.job.config import JobConfig
from plait.run.job.job import Job, make_job
from plait.table.mesh import Mesh

AXIS = "ranks"


class Reached(Exception):  # noqa: N818
    """The optimizer has been reached with gradients that it may use."""


class Typed(list[Tensor]):
    """Gradients that a hook keeps: partial, as those of the parameter."""

    def append(self, gradient: Tensor) -> None:
        super().append(spmd.assert_type(gradient.clone(), {AXIS: spmd.P}))


class OneRank:
    """What an adapter asks of a ``Comm``."""

    rank, mesh = 0, Mesh.parse("shard=2")


def ddp_by_hand(job: Job, model: nn.Module, comm: Any) -> Driven:
    """In the place of DDP, which sums where the checker does not look: the same in Python."""
    optimizer = job.optimizer(model.parameters())

    def step(batches: Sequence[Any], count: float, clip: float | None) -> None:
        for batch in batches:
            (job.loss_fn(model, batch) * comm.mesh.size / count).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(comm.mesh.size)  # type: ignore[union-attr]
        if clip is not None:
            clip_by_norm(model, clip)
        optimizer.step()

    return Driven(model, optimizer, step)


def loss_sum(model: nn.Module, batch: Any, part: slice = slice(None)) -> Tensor:
    """The loss of a rank, told to be a part of a sum."""
    return spmd.reinterpret(silent_bug_jobs.loss_sum(model, batch, part), AXIS, src=spmd.V, dst=spmd.P)


def refusal(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the checker says of a bug; empty where it lets it pass."""
    monkeypatch.setattr(silent_bugs, "loss_sum", loss_sum)
    monkeypatch.setattr(silent_bugs, "ddp", ddp_by_hand)
    job, batch = replace(make_job(JobConfig(job=JOB, batch=SAMPLES)), loss_fn=loss_sum), JOB.batch(0)
    model: Any = JOB.model(0)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(AXIS,))
    try:
        with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck(local=True):
            follow(bug, job, model, {name: spmd.assert_type(value, {AXIS: spmd.V}) for name, value in batch.items()})
    except Reached:
        return ""
    except spmd.SpmdTypeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    raise AssertionError("the optimizer was not reached")


def follow(bug: Bug, job: Job, model: Any, batch: Any) -> None:
    """One step up to the optimizer."""
    for parameter in model.parameters():
        spmd.assert_type(parameter, {AXIS: spmd.R})
        parameter.register_post_accumulate_grad_hook(partial)
    model.of_head = Typed()
    made = bug.adapter(job, model, OneRank())  # type: ignore[arg-type]
    assert made.step is not None

    def reached(*call: Any) -> None:
        for name, p in model.named_parameters():
            if spmd.maybe_get_axis_local_type(p.grad, AXIS) is spmd.P:
                raise spmd.SpmdTypeError(f"the optimizer is given a partial gradient of {name}")
        raise Reached

    made.optimizer.register_step_pre_hook(reached)
    made.step([batch, batch], 62, bug.clip)


def partial(parameter: nn.Parameter) -> None:
    spmd.assert_type(parameter.grad, {AXIS: spmd.P})
