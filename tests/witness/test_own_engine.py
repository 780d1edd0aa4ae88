"""plait's own engine under the public witness: right layouts are equal, planted faults are named."""

# ruff: noqa: E501 (a row is a line)

from dataclasses import replace
from pathlib import Path
from typing import Any

import data_faults as d
import field_faults as f
import pytest
import torch
import verify_cases as cases
from engine_cases import Made
from fault_table import CHAIN, DECODER, FOUR, GPT, RICH, TINY, TWO, Put
from torch import nn

import plait
from plait.comm import Comm, run_threads
from plait.referee.witness.judgement import Judgement
from plait.run.config.settings import VerifyConfig

STEPS = 3


def judged(config: VerifyConfig, folder: Path, put: Put | None = None) -> Judgement:
    """The judgement of a layout that runs with a fault in place, on threads; no dropout, which no judge draws."""
    config = replace(config, dropout=0.0)
    job = cases.job_of(config)

    def body(comm: Comm) -> None:
        engine, scheduler = job.engine(comm, config.parallelism, clip=config.task.update.clip)
        place = comm.data_rank, comm.mesh.data_size, config.layout.microbatches
        with plait.witness(engine, list(engine.optimizers), folder):
            for step in range(STEPS):
                engine.step(job.microbatches(step, *place))
                if scheduler is not None:
                    scheduler.step()

    with pytest.MonkeyPatch.context() as broken:
        if put is not None:
            put(broken)
        run_threads.run(config.machine.parsed_mesh, body, deadline=30)
    return plait.judge(job, folder, clip=config.task.update.clip, steps=STEPS)


RIGHT: list[tuple[VerifyConfig, dict[str, Any]]] = [
    (TINY, {"mesh": TWO, "strategy": "ddp"}),
    (TINY, {"mesh": "shard=3", "strategy": "zero1", "microbatches": 2}),
    (RICH, {"strategy": "zero3"}),
    (TINY, {"mesh": FOUR, "strategy": "hsdp", "microbatches": 3}),
    (TINY, {"mesh": "shard=4", "strategy": "hpz"}),
    (TINY, {"mesh": FOUR, "strategy": "psdp", "microbatches": 2}),
    (GPT, {"mesh": "shard=3", "strategy": "zero3", "microbatches": 2}),
    (DECODER, {"mesh": "pipe=2 shard=2", "schedule": "1f1b", "strategy": "zero3", "microbatches": 2}),
    (CHAIN, {"mesh": "pipe=2", "schedule": "zbv", "strategy": "ddp", "microbatches": 3}),
]


@pytest.mark.parametrize(("config", "layout"), RIGHT, ids=[" ".join(map(str, layout.values())) for _, layout in RIGHT])
def test_a_layout_is_the_run_of_a_single_process(config: VerifyConfig, layout: dict[str, Any], tmp_path: Path) -> None:
    found = judged(replace(config, **layout), tmp_path / "w")
    assert found.equal and found.residual < 1e-5, found


FAULTS: list[tuple[Put, VerifyConfig, dict[str, Any], int, str, str]] = [
    # fault, job, layout, step, phase, a part of the text
    (d.drop_the_last_microbatch, TINY, {"mesh": TWO, "strategy": "ddp", "microbatches": 3}, 0, "gradient", "forward 2 of rank 0 and forward 2 of rank 1 are missing"),
    (d.norm_of_this_rank_only, TINY, {"mesh": TWO, "strategy": "zero2"}, 0, "gradient", "by the norm of its own pieces"),
    (f.last_rank_never_updates, RICH, {"strategy": "zero1"}, 0, "gradient", "rank 2: every gradient is 0 times"),
    (f.forget_the_moments, RICH, {"strategy": "zero3"}, 1, "update", "the optimizer made something else"),
    (f.read_the_weights_of_the_step_before, RICH, {"strategy": "hpz", "mesh": FOUR}, 1, "gradient", "the values from before the last update"),
    (f.step_the_schedule_twice, RICH, {"strategy": "zero3"}, 2, "options", "lr is 0.0003 and the job's is 0.003"),
    (f.two_ranks_read_the_same_samples, RICH, {"strategy": "zero2"}, 0, "inputs", "samples 5, 6, 7, 8 seen by no rank"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("put", "config", "layout", "step", "phase", "text"), FAULTS, ids=[row[0].__name__ for row in FAULTS]
)
def test_a_planted_fault_is_named(
    put: Put, config: VerifyConfig, layout: dict[str, Any], step: int, phase: str, text: str, tmp_path: Path
) -> None:
    found = judged(replace(config, **layout), tmp_path / "w", put)
    assert (found.step, found.phase) == (step, phase) and text in found.text, found


def adapted() -> nn.Module:
    """A frozen layer below one that trains."""
    base = nn.Linear(3, 5).requires_grad_(False)
    return Made(lambda m, x: m.head(m.base(x)), base=base, head=nn.Linear(5, 3))


def test_a_loop_of_a_program_with_a_frozen_layer(tmp_path: Path) -> None:
    def batch(step: int) -> Any:
        return torch.randn(9, 3, generator=torch.Generator().manual_seed(step))

    def loss(model: Any, x: Any) -> Any:
        return (model(x) - x.sin()).square().sum()

    job = plait.UserJob(adapted, loss, batch, len, lambda p: torch.optim.AdamW(p, lr=0.1))
    first = job.model(0).state_dict()

    def body(comm: Comm) -> None:
        model = adapted()
        model.load_state_dict(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
        with plait.witness(engine, optimizer, tmp_path / "w"):
            for step in range(STEPS):
                rows = batch(step)[comm.rank * 3 : comm.rank * 3 + 3]
                engine.backward(loss(model, rows), len(rows))
                optimizer.step()

    plait.run_threads("shard=3", body, deadline=30)
    assert plait.judge(job, tmp_path / "w").equal


def test_a_tensor_axis_is_refused(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        with plait.empty_parameters():
            model = Made(lambda m, x: m.product(x), product=nn.Linear(3, 4))
        plan, optimizer = {"product": "gathered"}, torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plait.Engine(model, comm, strategy="ddp", optimizer=optimizer, tensor_plan=plan)
        plait.witness(engine, list(engine.optimizers), tmp_path)

    with pytest.raises(ValueError, match=r"'product\..*' is cut over a tensor axis"):
        plait.run_threads("tensor=2", body)
    with pytest.raises(ValueError, match=r"is cut over a tensor axis, or updated whole on one rank"):
        judged(replace(GPT, mesh="tensor=2", heads=2, kv_heads=2, strategy="ddp"), tmp_path / "w")
