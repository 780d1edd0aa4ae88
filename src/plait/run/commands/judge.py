"""``plait judge``: compares the records of a training loop under ``plait.witness`` with a single-process run.

Exit codes: 0 equal, 1 different, 2 bad input.
"""

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.text import Text

from plait.checkpoint.files.reading import read_text
from plait.checkpoint.files.writing import write_json
from plait.comm import Comm
from plait.referee.witness.declared import Rounding
from plait.referee.witness.grid import MICROBATCHES, RANKS, GridCell, cells_up_to, growth, told_factor
from plait.referee.witness.judge import judge
from plait.referee.witness.judgement import Judgement
from plait.referee.witness.run import run_engine, with_engine
from plait.referee.witness.stored import read_witnessed
from plait.run.config import VerifyConfig, validate, with_job
from plait.run.job.config import JobConfig
from plait.run.job.job import make_job
from plait.run.launch.local import launch
from plait.run.report.screen import screen, working


@dataclass(frozen=True)
class JudgeConfig(JobConfig):
    """Hold a run that was witnessed, of any engine, against the single process; name the first thing that is wrong.

    Exit code 0: equal, 1: different, 2: bad input.
    """

    folder: tyro.conf.Positional[tuple[str, ...]] = ()
    """The folder that plait.witness wrote, with all ranks. Several folders, of one loop on different numbers of ranks
    or with different numbers of forwards, show how a factor grows."""
    dropout: float = 0.0
    """The dropout probability of the loop; no engine can be replayed with dropout."""
    clip: float | None = None
    """The global gradient norm to which the loop clips; None: it does not."""
    rounding: Rounding | None = None
    """The precision of the loop's products or sums where the job has more: tf32 for products on a GPU, bf16 or fp16
    for autocast, an all-reduce or a DDP hook."""
    floor: float | None = None
    """Exit with 1 also where a gradient can only be judged to this share of its largest element (0.05: 5 %)."""
    json: str | None = None
    """Write the judgement here as JSON; "-" is the standard output."""


def run(config: JudgeConfig, argv: Sequence[str] = ()) -> int:
    """Judges, then shows and writes the judgement.  ``argv`` is the command that repeats it."""
    config = with_job(config)
    if config.dtype.endswith("-mixed"):
        raise ValueError(f"dtype {config.dtype}: a judgement is of one dtype, that of the loop's parameters")
    if len(config.folder) != 1:
        return _run_judge_grid(config, argv)
    with working():
        judgement = judge(make_job(config), config.folder[0], clip=config.clip, rounding=config.rounding)
    code = told(judgement, config.json, argv, config.floor)
    if config.json != "-":
        screen(soft_wrap=True).print(f"recording: {judgement.recording}", highlight=False)
    return code


def _run_judge_grid(config: JudgeConfig, argv: Sequence[str]) -> int:
    """Judges several witnessed runs of one loop, and shows how the factor grows."""
    if not config.folder:
        raise ValueError("folder is empty: give what plait.witness has written")
    job, cells, found = make_job(config), [], []
    for folder in config.folder:
        witnessed = read_witnessed(folder)
        forwards = max(len(run.step(0).calls) for run in witnessed.runs)
        cells.append(GridCell({RANKS: len(witnessed.runs), MICROBATCHES: forwards}))
        with working():
            judgement = judge(job, folder, clip=config.clip, rounding=config.rounding)
        found.append(asdict(judgement) | {"equal": judgement.equal and judgement.judged_to <= (config.floor or 1.0)})
        if config.json != "-":
            screen(soft_wrap=True).print(folder, style="bold", markup=False)
            told(judgement, None, argv, config.floor)
    return _told_growth(cells, found, config.json, argv)


def run_verify_engine(config: VerifyConfig, comm: Comm, argv: Sequence[str] = ()) -> int:
    """Runs this rank's part of ``plait verify --engine``.  Rank 0 judges, prints and returns the exit code."""
    with working(comm.rank == 0):
        judgement = run_engine(config, comm)
    return 0 if judgement is None else told(judgement, config.json, argv)


def run_grid(config: VerifyConfig, argv: Sequence[str]) -> int:
    """Verifies the engine on every layout up to the config's, one by one, and shows how the factor grows."""
    if config.engine is None:
        raise ValueError("grid without engine: give --engine as well; for layouts of plait there is --matrix")
    if config.json == "-":
        raise ValueError("json - beside grid, whose layouts speak on the standard output: give a file")
    cells = cells_up_to(config.parsed_mesh, config.microbatches)
    configs = [replace(config, mesh=c.mesh, microbatches=c.sizes[MICROBATCHES], grid=False, json=None) for c in cells]
    for one in configs:
        validate(one)
    checked = [with_engine(one) for one in configs]
    console, found = screen(soft_wrap=True), []
    words = [word for word in argv if word not in ("--grid", "--no-grid")]
    with tempfile.TemporaryDirectory(prefix="plait-grid-") as folder:
        for cell, one in zip(cells, checked, strict=True):
            place = Path(folder) / "told.json"
            own = ["--no-grid", "--mesh", cell.mesh, "--microbatches", str(one.microbatches), "--json", str(place)]
            console.print(str(cell), style="bold")  # rank 0 of the cell prints the judgement
            body = partial(run_verify_engine, replace(one, json=str(place)), argv=[*words, *own[:-2]])
            code = launch(one, body, ["-m", "plait", *words, *own])
            if code > 1 or not place.exists():
                return code or 1
            found.append(json.loads(read_text(place, "a judgement")))
            place.unlink()
    return _told_growth(cells, found, config.json, argv)


def _told_growth(
    cells: Sequence[GridCell], found: Sequence[dict[str, Any]], place: str | None, argv: Sequence[str]
) -> int:
    """Prints and writes how a factor grows over layouts, and returns the exit code."""
    law = growth(cells, [told_factor(one["factor"], equal=one["equal"]) for one in found])
    if law:
        first = next(one for one in found if not one["equal"])
        law = f"{first['phase']} {first['name']}".strip() + f": {law}"
    if place is not None:
        rows = [{"layout": str(cell), **one} for cell, one in zip(cells, found, strict=True)]
        write_json(place, {"layouts": rows, "growth": law, "command": shlex.join(["plait", *argv])})
    if place != "-":
        screen(soft_wrap=True).print(law or f"equal on {len(cells)} layouts", markup=False)
    return 0 if all(one["equal"] for one in found) else 1


def told(judgement: Judgement, place: str | None, argv: Sequence[str], floor: float | None = None) -> int:
    """Prints or writes a judgement and returns its exit code: with a ``floor``, 1 if it is judged more coarsely."""
    words = {"equal": judgement.equal, "verdict": judgement.word, "command": shlex.join(["plait", *argv])}
    if place is not None:
        write_json(place, asdict(judgement) | words)
    if place != "-":
        color = {"equal": "bold green", "different": "bold red"}.get(judgement.word, "bold yellow")
        screen(soft_wrap=True).print(Text.assemble((judgement.word, color), f": {judgement.text}"))
    return 0 if judgement.equal and (floor is None or judgement.judged_to <= floor) else 1
