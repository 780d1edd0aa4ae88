"""``plait train``: checks the conditions for a run, starts it, and continues it after a restart."""

import sys
from collections.abc import Sequence
from functools import partial

from plait.comm.agree import gather_ints
from plait.comm.base import NO_NOTE, Comm
from plait.comm.texts import check_together
from plait.messages.escape import say
from plait.run.config.check import validate
from plait.run.config.settings import TrainConfig, with_job
from plait.run.job.sections import flags
from plait.run.launch.agent import Limits
from plait.run.launch.local import is_a_rank, launch
from plait.run.train.resume import check_places, has_settings, hint_to_resume, newest_sound, restarted
from plait.run.train.run import run_train
from plait.table.mesh import AXES


def run(config: TrainConfig, argv: Sequence[str]) -> int:
    config, body = with_job(config), train_again  # as a rank, which agrees with the others on the number of starts
    if not is_a_rank(config.machine):
        body = run_train
        validate(config)
        if _is_done(config, check_places(config)):
            return 0
    again = partial(newest_sound, config), partial(hint_to_resume, config)
    limits = Limits(config.course.restarts, config.course.grace, *again)
    return launch(
        config.machine, partial(body, config, argv=argv), ["-m", "plait", *argv], limits, settings=flags(config)
    )


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
    return 0 if _is_done(config, done) else run_train(config, comm, argv=argv)


def _is_done(config: TrainConfig, done: str | None) -> bool:
    if done:
        say(f"{done}\n", sys.stderr if config.files.json == "-" else sys.stdout)
    return bool(done)
