"""``plait judge``: what a training loop has left under ``plait.witness``, beside the run of a single process.

Exit codes: 0 equal, 1 different, 2 bad input.
"""

from dataclasses import asdict, dataclass

import tyro
from rich.text import Text

from plait.comm import Comm
from plait.config import VerifyConfig, with_job
from plait.job.config import JobConfig
from plait.job.job import make_job
from plait.report.screen import screen
from plait.verify.run import write_json
from plait.witness.judge import judge
from plait.witness.judgement import Judgement
from plait.witness.run import run_engine


@dataclass(frozen=True)
class JudgeConfig(JobConfig):
    """Hold a run that was witnessed, of any engine, against the single process; name the first thing that is wrong.

    Exit code 0: equal, 1: different, 2: bad input.
    """

    folder: tyro.conf.Positional[str] = ""
    """What plait.witness has written, all ranks in one folder."""
    dropout: float = 0.0
    """The probability of dropping, with which no engine can be replayed."""
    clip: float | None = None
    """The global gradient norm to which the loop clips; None: it does not."""
    json: str | None = None
    """Write the judgement here as JSON; "-" is the standard output."""


def run_judge(config: JudgeConfig) -> int:
    """The judgement, shown and written."""
    config = with_job(config)
    if config.dtype.endswith("-mixed"):
        raise ValueError(f"dtype {config.dtype}: a judgement is of one dtype, that of the loop's parameters")
    return told(judge(make_job(config), config.folder, clip=config.clip), config.json)


def run_verify_engine(config: VerifyConfig, comm: Comm) -> int:
    """This rank's part of ``plait verify --engine``; rank 0 judges, prints and returns the exit code."""
    judgement = run_engine(config, comm)
    return 0 if judgement is None else told(judgement, config.json)


def told(judgement: Judgement, json: str | None) -> int:
    """Prints a judgement, or writes it; its exit code."""
    if json is not None:
        write_json(json, {**asdict(judgement), "equal": judgement.equal})
    if json != "-":
        word = ("equal", "bold green") if judgement.equal else ("different", "bold red")
        screen(soft_wrap=True).print(Text.assemble(word, f": {judgement.text}"))
    return 0 if judgement.equal else 1
