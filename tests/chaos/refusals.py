"""Faults that must be reported or change nothing: a full disk, strangers."""

import os
import socket
import subprocess
import time
from contextlib import closing, suppress

from ground import EVERY, PATIENCE, RANKS, Ground, wait_for_step
from observed import LOOPBACK, listening
from trials import Result, injected, outcome

from plait.checkpoint.folder import CHECKPOINTS
from plait.run.launch.fork_server import PYTHON


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
