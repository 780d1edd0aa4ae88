"""What processes do for ``test_curves.py``: every silent bug for thirty steps, and the loss that a curve would show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from engine_ranks import become
from silent_bug_jobs import CHAIN, JOB, TOKENS, WIDTH, Bug
from silent_bugs import BUGS, RIGHT
from torch import Tensor

from plait.comm.process import ProcessComm
from plait.comm.texts import check_together
from plait.referee.witness.replay import Replay
from plait.referee.witness.run import drive, with_engine
from plait.referee.witness.stored import read_witnessed
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job
from plait.table.mesh import AXES

STEPS, SEEDS = 30, 8
NEXT = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
MATRIX = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5


def learnt_text(step: int) -> dict[str, Tensor]:
    """Every token has its successor; the lengths are those of the silent bugs' job."""
    whole = JOB.batch(step)
    return {"tokens": whole["tokens"], "targets": NEXT[whole["tokens"]].masked_fill(whole["targets"] < 0, -100)}


def learnt_points(step: int) -> tuple[Tensor, Tensor]:
    x, _ = CHAIN.batch(step)
    return x, torch.tanh(x @ MATRIX)


TEXT, POINTS = replace(JOB, batches=learnt_text), replace(CHAIN, batches=learnt_points)
"""The jobs of the silent bugs, with something in the data to learn."""


def config_of(bug: Bug) -> VerifyConfig:
    return replace(bug.config, job=POINTS if bug.mesh.startswith("pipe") else TEXT, steps=STEPS)


def curve(config: VerifyConfig, parameters: Sequence[dict[str, Tensor]]) -> list[float]:
    """The mean loss of each step's batch at the parameters before it."""
    replay, losses = Replay(make_job(config.task, config.dtypes)), []
    with torch.no_grad():
        for step, values in enumerate(parameters):
            replay.set(values)
            losses.append(replay.job.loss_fn(replay.model, replay.batch(step)).item() / replay.count(step))
    return losses


def right_curve(config: VerifyConfig, seed: int) -> list[float]:
    """The same of one process with one forward a step."""
    replay, losses = Replay(make_job(replace(config.task, seed=seed), config.dtypes)), []
    for step in range(STEPS):
        count = replay.count(step)
        part = replay.part(step, None, count)
        losses.append(part.loss / count)
        norm = torch.stack([g.norm() for g in part.gradients.values()]).norm().item()
        factor = 1.0 if config.task.update.clip is None else min(1.0, config.task.update.clip / (norm + 1e-6))
        replay.update({name: g * factor for name, g in part.gradients.items()})
    return losses


def witnessed_curve(config: VerifyConfig, folder: Path) -> list[float]:
    """That of the engine: its parameters after each update, those of the first rank where ranks differ."""
    witnessed, shapes = read_witnessed(folder), Replay(make_job(config.task, config.dtypes)).shapes
    after = [{run.rank: run.start for run in witnessed.runs}]
    after += [{run.rank: run.step(n).of("after") for run in witnessed.runs} for n in range(STEPS - 1)]
    return curve(config, [witnessed.whole(pieces, shapes) for pieces in after])


def rank_main(rank: int, ranks: int, port: int, path: str) -> None:
    """Runs them all; rank 0 writes each one's curve, and those of one process from several seeds."""
    become(rank, ranks, port)
    found = {}
    for bug in (*RIGHT, *BUGS):
        config = config_of(bug)
        validate(config)
        config = with_engine(config)
        comm = ProcessComm.from_env(config.machine.parsed_mesh)
        folder = Path(path) / bug.adapter.__name__
        drive(make_job(config.task, config.dtypes), config, comm, folder)
        check_together(comm, None, AXES)
        if rank == 0:
            seeds = [right_curve(config, config.task.samples.seed + n) for n in range(SEEDS)]
            found[bug.adapter.__name__] = {"curve": witnessed_curve(config, folder), "seeds": seeds}
        comm.close()
    if rank == 0:
        (Path(path) / "found.json").write_text(json.dumps(found))
