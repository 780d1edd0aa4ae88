"""``plait train``: checks the conditions for a run, starts it, and continues it after a restart."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from plait.comm.agree import gather_ints
from plait.comm.base import NO_NOTE, Comm
from plait.comm.texts import check_together
from plait.messages.escape import say
from plait.run.config.check import validate
from plait.run.config.settings import TrainConfig, with_job
from plait.run.job.sections import flags
from plait.run.launch.limits import Limits
from plait.run.launch.local import is_a_rank, launch
from plait.run.train.resume import check_places, has_settings, hint_to_resume, newest_sound, restarted
from plait.run.train.run import run_train
from plait.table.mesh import AXES


def run(config: TrainConfig, argv: Sequence[str]) -> int:
    """Trains on the ranks of the mesh and returns the exit code."""
    config = with_job(config)
    body: Callable[[Comm], int]
    if is_a_rank(config.machine):  # the ranks agree on the number of starts
        body = partial(train_again, config, argv=argv)
    else:
        validate(config)
        if done := check_places(config):
            say(f"{done}\n", sys.stderr if config.files.json == "-" else sys.stdout)
            return 0
        body = partial(run_train, config, argv=argv)
    again = partial(newest_sound, config), partial(hint_to_resume, config)
    limits = Limits(config.course.restarts, config.course.grace, *again)
    return launch(config.machine, body, ["-m", "plait", *argv], limits, settings=flags(config))


def train_again(config: TrainConfig, comm: Comm, argv: Sequence[str]) -> int:
    """Continues a rank's run after earlier attempts.  Writes nothing before all ranks have looked."""
    done, wrong = None, None
    # A restarted agent is younger than the files of the other ranks.
    begun = any(row[0] for row in gather_ints(comm, [has_settings(config)], AXES, NO_NOTE))
    try:
        config = restarted(config, comm.attempt, begun)
        validate(config)
        done = check_places(config)
    except Exception as error:
        wrong = error
    check_together(comm, wrong, AXES)
    if done:
        say(f"{done}\n", sys.stderr if config.files.json == "-" else sys.stdout)
        return 0
    return run_train(config, comm, argv=argv)
