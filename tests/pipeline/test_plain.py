"""A run of one stage takes a plain path: few files are between the step and the user's loss function."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from engine_cases import adamw
from torch import Tensor, nn

import plait.step.engine
from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh

SOURCE = Path(plait.step.engine.__file__).parents[1]
BETWEEN = [f"{file}.py" for file in ("pipeline/runtime", "pipeline/stage", "zero/unshard", "forward/context")]
BETWEEN += ["forward/interceptor.py"]


def test_five_files_are_between_the_step_and_the_loss() -> None:
    template, seen = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1), nn.Linear(5, 5)), list[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            seen.append(file.relative_to(SOURCE).as_posix())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        sys.setprofile(None)
        return model(x).square().sum()

    def body(comm: Comm) -> None:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy="zero3", optimizer=adamw(model.parameters()), loss_fn=loss, count_fn=len)
        engine.step([torch.ones(2, 5)])  # the first step looks at more
        if comm.rank == 0:
            sys.setprofile(note)
        engine.step([torch.ones(2, 5)])

    run(Mesh(shard=2), body)
    assert [*dict.fromkeys(seen[seen.index(BETWEEN[0]) :])] == BETWEEN
