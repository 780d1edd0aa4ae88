"""``plait verify``: verifies one layout, a matrix of layouts, or an engine other than plait's."""

from collections.abc import Sequence
from functools import partial

from plait.comm.base import Comm
from plait.referee.verify import run_verify
from plait.referee.verify.kernels import repeatable
from plait.referee.verify.matrix import run_matrix
from plait.referee.witness.run import run_engine, with_engine
from plait.run.commands.judge import told
from plait.run.config.check import validate
from plait.run.config.machine import resolve_device
from plait.run.config.settings import VerifyConfig, with_job
from plait.run.job.sections import flags
from plait.run.launch.local import launch
from plait.run.report.screen import working


def run(config: VerifyConfig, argv: Sequence[str]) -> int:
    if config.comparison.matrix is not None and config.comparison.engine is None:
        return run_matrix(config)
    config = with_job(config)
    validate(config)
    body = run_verify
    if config.comparison.probe_token and (config.comparison.engine, config.comparison.matrix) != (None, None):
        raise ValueError("--probe-token beside --engine or --matrix: it asks one layout of plait; give one of them")
    if config.comparison.engine is not None:
        config, body = with_engine(config), verify_engine
    with repeatable(resolve_device(config.machine)):
        return launch(config.machine, partial(body, config, argv=argv), ["-m", "plait", *argv], settings=flags(config))


def verify_engine(config: VerifyConfig, comm: Comm, argv: Sequence[str] = ()) -> int:
    """Runs this rank's part of ``plait verify --engine``.  Rank 0 judges, prints and returns the exit code."""
    with working(comm.rank == 0):
        judgement = run_engine(config, comm)
    return 0 if judgement is None else told(judgement, config.files.json, argv)
