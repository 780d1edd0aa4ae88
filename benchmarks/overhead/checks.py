"""Measures the cost of checks and the watch: steps with and without them in turns, in one run.

    plain  collectives  drift  watched | collectives  drift  ... | ...    a turn is some steps; medians are compared

``python benchmarks/overhead/checks.py [--steps STEPS-OF-A-TURN] [--rounds N] FLAG-OF-PLAIT-TRAIN...``; in the turn
"drift" every step is checked, so that a run with --check-drift N pays one N-th of what it is slower.  In "watched" each
operation is written on the status page ``TIMES`` times more, for one time is less than the noise of a step; what a step
is slower, divided by ``TIMES``, is what the page costs.  The processor time of the heartbeat's thread is printed beside
it.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import tyro

from plait.comm import Comm
from plait.comm.agree import gather_floats
from plait.referee.sanitize.collectives import CollectiveCheck
from plait.referee.sanitize.drift import DriftCheck
from plait.run.config.settings import TrainConfig
from plait.run.job.job import make_job
from plait.run.launch.local import launch
from plait.run.watch.rank import RankSide
from plait.table.collectives import Note
from plait.table.mesh import AXES

TURNS = ("plain", "collectives", "drift", "watched")
TIMES = 20


def measure(comm: Comm, config: TrainConfig, steps: int, rounds: int) -> int:
    """Prints milliseconds of a step, the slowest rank's, and the cost of each check."""
    job = make_job(config.task, config.dtypes)
    engine, _ = job.engine(comm, config.parallelism)
    batches = job.microbatches(0, comm.data_rank, comm.mesh.data_size, config.layout.microbatches)
    check, observers = CollectiveCheck(comm), comm.observers
    watched = observers + tuple(one for one in observers if isinstance(one, RankSide)) * TIMES
    beat = next(thread for thread in threading.enumerate() if thread.name == "plait heartbeat")
    clock = time.pthread_getcpuclockid(beat.ident or 0)
    began, beats = time.perf_counter(), time.clock_gettime(clock)
    seconds: dict[str, list[float]] = {turn: [] for turn in TURNS}
    for number in range(rounds + 1):
        for turn in TURNS[number % len(TURNS) :] + TURNS[: number % len(TURNS)]:
            comm.barrier(AXES)
            comm.check = check if turn == "collectives" else None
            comm.observers = watched if turn == "watched" else observers
            engine._watchers = [DriftCheck(engine, 1)] if turn == "drift" else []
            for _ in range(steps):
                comm.ledger.clear()
                start = time.perf_counter()
                engine.step(batches)
                seconds[turn] += [time.perf_counter() - start] if number else []  # the first round warms up
            comm.check, comm.observers = None, observers
    share = (time.clock_gettime(clock) - beats) / (time.perf_counter() - began)
    mine = [statistics.median(seconds[turn]) for turn in TURNS]
    slowest = dict(zip(TURNS, map(max, zip(*gather_floats(comm, mine, AXES, Note("bench")), strict=True)), strict=True))
    if not comm.rank:
        plain, checked, drift, watched_step = (slowest[turn] for turn in TURNS)
        page = (watched_step - plain) / TIMES
        print(
            f"{comm.mesh}, {config.row.name}, {engine.placed.num_parameters:,} parameters: {plain * 1e3:.2f} ms a step"
        )
        print(f"  --check-collectives {checked * 1e3:.2f} ms: {checked / plain:.2f} times")
        print(
            f"  the status page {page * 1e6:.0f} us: {page / plain * 100:.2f} %\n"
            f"  the heartbeat's thread {share * 100:.3f} % of a core\n"
            f"  a check of drift {(drift - plain) * 1e3:.2f} ms: every 100 steps {(drift / plain - 1):.2f} %",
            flush=True,
        )
    return 0


def main(words: list[str]) -> int:
    numbers = {"--steps": 10, "--rounds": 12}
    for name in numbers:
        if name in words:
            place = words.index(name)
            numbers[name] = int(words.pop(place + 1))
            words.pop(place)
    config = tyro.cli(TrainConfig, args=words)
    command = [__file__, *sys.argv[1:]]
    return launch(config.machine, lambda comm: measure(comm, config, *numbers.values()), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
