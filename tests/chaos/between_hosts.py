"""The trials between two hosts: one rank on rank 0's host, two on the other, under torchrun.

Findings of the other host must be on the screen of rank 0's host, where people look.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ground import EVERY, PATIENCE, Ground, wait_for_step
from observed import Observed
from trials import SOON, Result, injected
from two_hosts import TwoHosts, two_hosts


@contextmanager
def _trained(ground: Ground, out: Path, *more: str) -> Iterator[tuple[TwoHosts, Observed, Observed]]:
    """The run of all trials, on two hosts: shared memory inside of the one with two ranks, gloo across."""
    with tempfile.TemporaryDirectory(dir=ground.folder) as folder, two_hosts(Path(folder)) as hosts:
        commands = hosts.torchrun("-m", "plait", *ground.words(out, "--world", "shared_memory", *more))
        a, b = (ground.start([], {"OMP_NUM_THREADS": "1"}, program=command) for command in commands)
        yield hosts, a, b


def ended_or_stopped(ground: Ground, number: int) -> Result:
    """SIGKILL, and every second time SIGSTOP, for a rank of the other host."""
    rank, step = 1 + number % 2, ground.random.randrange(EVERY + 2, ground.steps - 1)
    fault, said = ("stop", "is stopped") if number % 2 else ("kill", "was killed by SIGKILL")
    with _trained(ground, ground.new(), "--inject", f"{fault}@rank={rank},step={step}") as (_, a, b):
        moment = injected(b)
        last = moment.at
        for name, child in (("its own", b), ("rank 0's", a)):
            if (told := child.wait_for(f"plait: rank {rank} {said}", SOON, moment.at)) is None:
                return Result(f"rank {rank} was not named on {name} host: {child.text()[-500:]}")
            last = max(last, told.at)
        seen = {"told": last - moment.at}
        if fault == "kill" and None in (a.finish(PATIENCE), b.finish(PATIENCE)):
            return Result("a host did not end", seen)
    return Result("", seen)


def link_cut(ground: Ground, number: int) -> Result:
    """The link is cut, and every second time mended, after which the run goes on."""
    mended, out = number % 2 == 0, ground.new()
    with _trained(ground, out) as (hosts, a, b):
        if wait_for_step(out / "metrics.jsonl", EVERY + 2, PATIENCE, a) is None:
            return Result(f"it did not train: {a.text()[-500:]}")
        hosts.cut()
        moment = time.monotonic()
        last = moment
        for child, said in (
            (a, r"host plait-b \(ranks 1, 2\) was last heard"),
            (b, "host of rank 0 has not been reached"),
        ):
            if (told := child.wait_for(said, SOON, moment)) is None:
                return Result(f"'{said}' was not told: {child.text()[-500:]}")
            last = max(last, told.at)
        seen = {"told": last - moment}
        if mended:
            hosts.mend()
        codes = a.finish(PATIENCE), b.finish(PATIENCE)
        if mended:
            wrong = ground.same_run(out) if codes == (0, 0) else f"exit codes {codes}: {a.text()[-500:]}"
            return Result(wrong, seen)
        if None in codes or 0 in codes:
            return Result(f"exit codes {codes} where both hosts had to end with an error", seen)
        if not re.search(r"rank \d waited \d+ s in", a.text()):
            return Result(f"what was waited for was not named: {a.text()[-500:]}", seen)
    return Result("", seen)
