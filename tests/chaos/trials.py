"""Faults that end, stop and slow ranks, fill their disks, or come from strangers.

A trial is right or wrong, and has measured the numbers of its goal.
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ground import EVERY, PATIENCE, RANKS, Ground, lines_of, wait_for_step
from observed import LOOPBACK, Observed, SaidLine, alive, listening

from plait.checkpoint.folder import CHECKPOINTS
from plait.run.launch.fork_server import PYTHON

SOON = 30.0
"""Seconds within which what has a goal of a second is still waited for."""


@dataclass(frozen=True)
class Result:
    wrong: str = ""
    """Empty: all was as expected."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the goal, by their names in the row's limits."""


def injected(child: Observed) -> SaidLine:
    """The moment of the fault; ValueError if it never came."""
    line = child.wait_for("plait: injected", PATIENCE)
    if line is None:
        child.end()
        raise ValueError(f"the fault was never injected: {child.text()[-500:]}")
    return line


def outcome(
    child: Observed, wrong: str, seen: Mapping[str, float], *, code: int = 0, seconds: float = PATIENCE
) -> Result:
    """The result of a run that is to end with this code."""
    ended = child.finish(seconds)
    if not wrong and ended != code:
        wrong = f"exit code {ended} where {code} was due: {child.text()[-500:]}"
    return Result(wrong, seen)


def killed(ground: Ground, number: int) -> Result:
    """SIGKILL for a rank, at any operation of any step."""
    rank, step = number % RANKS, ground.random.randrange(EVERY + 2, ground.steps - 1)
    out = ground.new()
    fault = f"kill@rank={rank},step={step},operation={ground.random.randrange(1, 9)}"
    child = ground.start(ground.words(out, "--restarts", "1", "--inject", fault))
    moment = injected(child)
    told = child.wait_for(f"rank {rank}\\b.*killed by SIGKILL", SOON, moment.at)
    again = _first_new_step(out, step, moment.at, child)
    wrong = "" if told else f"rank {rank} was not named: {child.text()[-500:]}"
    if told and not child.wait_for(rf"in step {step - 1} \(counted from 0\)", 1, moment.at):
        wrong = f"step {step - 1} (counted from 0) was not named: {child.text()[-500:]}"
    seen = {} if told is None else {"told": told.at - moment.at}
    seen |= {} if again is None else {"restarted": again - moment.at}
    result = outcome(child, wrong, seen)
    return Result(result.wrong or ground.same_run(out), result.seen)


def _first_new_step(out: Path, step: int, since: float, child: Observed) -> float | None:
    """When the first step after the newest checkpoint was made again: the metrics were cut back to it before."""
    metrics, saved, cut = out / "metrics.jsonl", (step - 1) // EVERY * EVERY, False
    while time.monotonic() < since + PATIENCE and child.process.poll() is None:
        last = int(str((lines_of(metrics) or [{"step": 0}])[-1]["step"]))
        if cut and last > saved:
            return time.monotonic()
        cut |= last <= saved
        time.sleep(0.005)
    return None


def stopped(ground: Ground, number: int) -> Result:
    """SIGSTOP for a rank, and SIGCONT after the report; every fifth stays stopped."""
    rank, step = number % RANKS, ground.random.randrange(3, ground.steps - 5)
    out = ground.new()
    fault = f"stop@rank={rank},step={step},operation={ground.random.randrange(1, 9)}"
    child = ground.start(ground.words(out, "--restarts", "1", "--inject", fault))
    moment = injected(child)
    told = child.wait_for(f"rank {rank}\\b.*stopped", SOON, moment.at)
    if number % 5 != 4 and (process := re.search(r"process (\d+)", moment.text)):
        os.kill(int(process[1]), signal.SIGCONT)
    wrong = "" if told else f"rank {rank} was not named: {child.text()[-500:]}"
    result = outcome(child, wrong, {} if told is None else {"told": told.at - moment.at})
    if number % 5 != 4 and not result.wrong and child.first("plait: restart"):
        return Result("it went on, and was started again all the same", result.seen)
    return Result(result.wrong or ground.same_run(out), result.seen)


def launcher_killed(ground: Ground, number: int) -> Result:
    """SIGKILL for the launcher; at every other trial one of its ranks stands still."""
    out = ground.new()
    child = ground.start(ground.words(out))
    if wait_for_step(out / "metrics.jsonl", 3, PATIENCE, child) is None:
        child.end()
        return Result(f"the run never began: {child.text()[-500:]}")
    below = child.below()
    if len(below) <= RANKS:
        child.end()
        return Result(f"{len(below)} processes were found below the launcher of {RANKS} ranks")
    if number % 2:
        os.kill(below[-1].pid, signal.SIGSTOP)
    os.kill(child.pid, signal.SIGKILL)
    moment = time.monotonic()
    while (left := [p for p in below if alive(p)]) and time.monotonic() < moment + SOON:
        time.sleep(0.01)
    seconds = time.monotonic() - moment
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    child.end()
    return Result(f"{len(left)} of {len(below)} processes are left" if left else "", {"gone": seconds})


ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def asked_to_end(ground: Ground, number: int) -> Result:
    """A signal to the launcher, or to one rank: a last checkpoint, then the same run goes on.  One that this process
    ignores (``nohup``) its runs ignore too."""
    heard = [name for name in ASKED if signal.getsignal(name) is not signal.SIG_IGN]
    name, out = heard[number % len(heard)], ground.new()
    step = ground.random.randrange(3, ground.steps - 5)
    to_rank = number // len(heard) % 2
    fault = ("--inject", f"signal={name.name}@rank={number % RANKS},step={step}") if to_rank else ()
    child = ground.start(ground.words(out, *fault))
    if to_rank:
        moment = injected(child).at
    else:
        wait_for_step(out / "metrics.jsonl", step, PATIENCE, child)
        moment = time.monotonic()
        os.kill(child.pid, name)
    result = outcome(child, "", {}, code=128 + name)
    seen = {"ended": time.monotonic() - moment}
    if result.wrong:
        return Result(result.wrong, seen)
    made = int(str(lines_of(out / "metrics.jsonl")[-1]["step"]))
    if not (out / CHECKPOINTS / f"step-{made:06}").is_dir():
        return Result(f"{made} steps were made, and no checkpoint has them", seen)
    if to_rank and f"{name.name} (on rank {number % RANKS})" not in child.text():
        return Result(f"that rank {number % RANKS} got {name.name} was not told: {child.text()[-500:]}", seen)
    again = ground.start(ground.words(out, "--resume", "auto"))
    result = outcome(again, "", seen)
    return Result(result.wrong or ground.same_run(out), seen)


LONGER = ("--microbatches", "4", "--layers", "4")
"""Steps of a tenth of a second or more: of shorter ones more are looked at, since many of them together say little."""
SLOWER = r"computes [0-9.]+ times as long"


def slow(ground: Ground, number: int) -> Result:
    """A rank that takes twice as long: told, and not ended."""
    rank, out = number % RANKS, ground.new()
    child = ground.start(ground.words(out, *LONGER, "--inject", f"slow=2x@rank={rank},step=5"))
    injected(child)
    told = child.wait_for(rf"rank {rank} {SLOWER}", PATIENCE)
    metrics = lines_of(out / "metrics.jsonl")
    seen = {} if told is None else {"steps": float(len(metrics) - 4)}
    wrong = "" if told else f"rank {rank} was not named: {child.text()[-500:]}"
    result = outcome(child, wrong, seen)
    return Result(result.wrong or _false_alarms(child, but=rank), seen)


def even(ground: Ground, number: int) -> Result:
    """No rank is slow: none may be reported."""
    child = ground.start(ground.words(ground.new(), *LONGER))
    result = outcome(child, "", {})
    alarms = len(re.findall(SLOWER, child.text()))
    return Result(result.wrong, {"share": alarms / ground.steps})


def _false_alarms(child: Observed, but: int) -> str:
    others = [rank for rank in range(RANKS) if rank != but]
    found = [rank for rank in others if re.search(rf"rank {rank} {SLOWER}", child.text())]
    return f"ranks {found} were told to be slow as well" if found else ""


def full_disk(ground: Ground, number: int) -> Result:
    """A rank cannot write: all end together, and the checkpoint before it loads."""
    rank, out, step = number % RANKS, ground.new(), 2 * EVERY + 1 + number % EVERY
    child = ground.start(ground.words(out, "--inject", f"disk-full@rank={rank},step={step}"))
    moment = injected(child)
    code, seconds = child.finish(PATIENCE), time.monotonic() - moment.at
    said = "\n".join(line.text for line in child.lines if line.stream == "err" and line.at > moment.at)
    if code not in (1, 2) or "Traceback" in said or str(out) not in said:
        return Result(f"exit code {code}: {said[-800:]}", {"ended": seconds})
    kept = sorted(folder.name for folder in (out / CHECKPOINTS).glob("step-*"))
    command = [*PYTHON, "-m", "plait", "checkpoint", "verify", "--all", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode or not kept or int(kept[-1][5:]) >= step:
        return Result(f"there are {kept}, of which not all verify: {done.stdout} {done.stderr}", {"ended": seconds})
    return Result("", {"ended": seconds})


GARBAGE = (
    b"\x00" * 64,
    os.urandom(4096),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


def strangers(ground: Ground, number: int) -> Result:
    """All listeners are on loopback and get garbage; the run equals the undisturbed one.

    Ranks are joined by gloo, since none listens where they share memory.
    """
    out = ground.new()
    child = ground.start(ground.words(out, "--world", "process"))
    wait_for_step(out / "metrics.jsonl", 2, PATIENCE, child)
    ports = listening([child.pid, *(process.pid for process in child.below())])
    outside = [port for port in ports if port.address not in LOOPBACK]
    wrong, thrown = f"{len(outside)} ports are open to others" if outside else "", 0
    for port in ports:
        for garbage in GARBAGE:
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port.number), 2)) as connection:
                connection.sendall(garbage)
                thrown += 1
    if not wrong and not thrown:
        wrong = f"nothing took the garbage, at {len(ports)} ports"
    result = outcome(child, wrong, {"ports": len(ports), "thrown": thrown})
    return Result(result.wrong or ground.same_run(out), result.seen)
