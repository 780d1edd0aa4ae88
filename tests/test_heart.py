"""The heart: the whole files that one zero3 step executes, counted. A reader need not open those of ``ASIDE``."""

import re
import sys
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.forward.interceptor import FIRST
from plait.table.mesh import AXES

SOURCE = Path(plait.__file__).parent
ASIDE = {
    "comm/ledger.py": "counts messages; nothing reads it in a step",
    "forward/batch.py": "finds the tensors of a batch, in any container",
    "forward/interceptor.py": "passes functions to handlers; rests in a model that draws nothing and has no axis",
    "zero/gradient_watch.py": "makes one number of a gradient, to find those that are not finite",
    "zero/program_reads.py": "reads by the program itself; a step only asks whether there were any",
}

MOST = 4_490
"""Lines of the other files; a change may only lower this number."""


@cache
def calls() -> tuple[list[tuple[Path, str]], ...]:
    """The functions that a later step of zero3 calls on each of two threads, in their order, each once: file, name."""
    seen: tuple[dict[tuple[str, str], None], ...] = ({}, {})

    def note(mine: dict[tuple[str, str], None], frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            mine.setdefault((frame.f_code.co_filename, frame.f_code.co_qualname))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out.square().sum()

    def body(comm: Comm) -> None:
        with plait.empty_parameters():
            model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters())
        engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer, loss_fn=loss, count_fn=len, clip=1.0)
        microbatches = [torch.ones(4, 8), torch.ones(3, 8)]
        for _ in range(FIRST):
            engine.step(microbatches)
        comm.barrier(AXES)
        before = sys.getprofile()
        sys.setprofile(partial(note, seen[comm.rank]))
        try:
            engine.step(microbatches)
        finally:
            sys.setprofile(before)

    plait.run_threads("shard=2", body, sanitize=False)
    return tuple([(Path(file), name) for file, name in one if Path(file).is_relative_to(SOURCE)] for one in seen)


def executed_files() -> set[Path]:
    return {file for rank in calls() for file, _ in rank}


def test_one_step_of_zero3_executes_few_lines() -> None:
    files = {path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines()) for path in executed_files()}
    assert {"step/engine.py", "zero/unit.py", "zero/gradients.py", "comm/thread.py", *ASIDE} <= files.keys()
    files = {name: lines for name, lines in files.items() if name not in ASIDE}
    table = "\n".join(f"{lines:5} {name}" for name, lines in sorted(files.items()))
    assert sum(files.values()) <= MOST, f"{sum(files.values())} lines in {len(files)} files, more than {MOST}\n{table}"


def test_a_step_enters_no_wing() -> None:
    wings = {"anymodel", "sharded", "shared_memory", "referee", "run"}
    assert not [path for path in executed_files() if path.relative_to(SOURCE).parts[0] in wings]


def test_the_guides_list_of_calls_is_true() -> None:
    page = (SOURCE.parents[1] / "docs" / "guide" / "a-step.md").read_text()
    told = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.<>]+)` \|", page, re.MULTILINE)
    order = [(file.relative_to(SOURCE).as_posix(), name) for file, name in calls()[0]]
    assert len(told) > 25 and not [one for one in told if one not in order]
    assert told == sorted(told, key=order.index)
