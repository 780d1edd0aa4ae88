"""``plait verify``: verifies one layout, a matrix of layouts, or an engine other than plait's."""

from collections.abc import Callable, Sequence
from functools import partial

from plait.comm.base import Comm
from plait.referee.verify import run_verify
from plait.referee.verify.matrix import run_matrix
from plait.referee.witness.run import with_engine
from plait.run.commands.judge import run_verify_engine
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig, with_job
from plait.run.job.sections import flags
from plait.run.launch.local import launch


def run(config: VerifyConfig, argv: Sequence[str]) -> int:
    """Verifies what the settings name and returns the exit code."""
    if config.comparison.matrix is not None and config.comparison.engine is None:
        return run_matrix(config)
    config = with_job(config)
    validate(config)
    body: Callable[[Comm], int] = partial(run_verify, config, argv=argv)
    if config.comparison.engine is not None:
        config = with_engine(config)
        body = partial(run_verify_engine, config, argv=argv)
    return launch(config.machine, body, ["-m", "plait", *argv], settings=flags(config))
