"""``plait judge``: compares the records of a training loop under ``plait.witness`` with a single-process run.

Exit codes: 0 equal, 1 different, 2 bad input.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import tyro
from rich.text import Text

from plait.checkpoint.files.writing import write_json
from plait.referee.witness.declared import Rounding
from plait.referee.witness.judge import judge
from plait.referee.witness.judgement import Judgement
from plait.run.config.settings import with_job
from plait.run.job.config import JobConfig, TaskConfig
from plait.run.job.job import make_job
from plait.run.report.screen import screen, working


@dataclass(frozen=True, init=False)
class JudgeConfig(TaskConfig):
    """Compare a witnessed run of any engine with the single process; name the first thing that is wrong.

    Exit code 0: equal, 1: different, 2: bad input.
    """

    folder: tyro.conf.Positional[str] = ""
    """The folder that plait.witness wrote, with all ranks."""
    task: JobConfig = JobConfig(dropout=0.0, clip=None)
    rounding: Rounding | None = None
    """The precision of the loop's products or sums if the job has more: tf32 for products on a GPU, bf16 or fp16
    for autocast, an all-reduce or a DDP hook."""
    json: str | None = None
    """Write the judgement here as JSON; "-" is the standard output."""


def run(config: JudgeConfig, argv: Sequence[str] = ()) -> int:
    """Judges, then shows and writes the judgement.  ``argv`` is the command that repeats it."""
    config = with_job(config)
    if config.task.network.dtype.endswith("-mixed"):
        raise ValueError(
            f"dtype {config.task.network.dtype}: a judgement is of one dtype, that of the loop's parameters"
        )
    if not config.folder:
        raise ValueError("folder is empty: give what plait.witness has written")
    with working():
        judgement = judge(make_job(config.task), config.folder, clip=config.task.update.clip, rounding=config.rounding)
    return told(judgement, config.json, argv)


def told(judgement: Judgement, place: str | None, argv: Sequence[str]) -> int:
    """Prints or writes a judgement and returns its exit code."""
    words = {"equal": judgement.equal, "verdict": judgement.word, "command": shlex.join(["plait", *argv])}
    write_json(place, asdict(judgement) | words)
    if place != "-":
        color = {"equal": "bold green", "different": "bold red"}.get(judgement.word, "bold yellow")
        screen(soft_wrap=True).print(Text.assemble((judgement.word, color), f": {judgement.text}"))
    return 0 if judgement.equal else 1
