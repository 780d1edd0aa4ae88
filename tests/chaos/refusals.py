"""Faults that must be refused or reported: ranks that do not fit together, a full disk, strangers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from contextlib import closing, suppress

from ground import EVERY, PATIENCE, RANKS, Ground, wait_for_step
from observed import LOOPBACK, Observed, listening
from trials import Result, injected, outcome

from plait.checkpoint.places import CHECKPOINTS
from plait.run.launch.fork_server import PYTHON

SHORT = 5.0
"""The deadline of runs whose ranks do not find each other."""


def _ranks(ground: Ground, changes: dict[int, dict[str, str]]) -> list[Observed]:
    """Starts three ranks by hand, some with other variables."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out, children = ground.new(), []
    for rank in range(RANKS):
        given = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given |= {"LOCAL_RANK": str(rank), **changes.get(rank, {})}
        if given.pop("absent", None) is None:
            words = ground.words(out, "--deadline", f"{SHORT:g}")
            children.append(ground.start(words, given))
    return children


WRONG_RANKS = (
    ({2: {"absent": "yes"}}, r"rank 2\b|ranks 2\b"),
    ({2: {"RANK": "1"}}, r"rank 1\b|rank 2\b|ranks 2\b"),
    ({1: {"WORLD_SIZE": "4"}}, r"4 processes|WORLD_SIZE"),
    ({1: {"RANK": "abc"}}, r"RANK"),
    ({1: {"MASTER_PORT": "port"}}, r"MASTER_PORT"),
    ({1: {"RANK": "7"}}, r"rank 7|RANK"),
)


def wrong_ranks(ground: Ground, number: int) -> Result:
    """A rank that is missing, there twice, impossible, or of another world."""
    changes, says = WRONG_RANKS[number % len(WRONG_RANKS)]
    children = _ranks(ground, changes)
    codes = [child.finish(PATIENCE) for child in children]
    seconds = max((child.lines[-1].at if child.lines else 0) - child.began for child in children)
    for child, code in zip(children, codes, strict=True):
        if code not in (1, 2) or "Traceback" in child.text():
            return Result(f"exit code {code}: {child.text()[-800:]}")
    if not any(re.search(says, child.text()) for child in children):
        return Result(f"nobody says {says!r}: {[child.text()[-300:] for child in children]}")
    return Result("", {"refused": seconds})


def port_taken(ground: Ground, number: int) -> Result:
    """Somebody else listens at the port, and is silent, talks HTTP, or closes at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port, kept = server.getsockname()[1], []
        child = ground.start(
            ground.words(ground.new(), "--deadline", f"{SHORT:g}"),
            {"RANK": "1", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        while child.process.poll() is None and time.monotonic() < child.began + PATIENCE:
            with suppress(TimeoutError, OSError):
                connection, _ = server.accept()
                kept.append(connection)
                if number % 3 == 1:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                elif number % 3 == 2:
                    connection.close()
        code, seconds = child.finish(1), time.monotonic() - child.began
        for connection in kept:
            connection.close()
    lines = child.text().splitlines()
    right = code == 2 and len(lines) == 1 and f"127.0.0.1:{port}" in lines[0]
    return Result("" if right else f"exit code {code}: {child.text()[-800:]}", {"refused": seconds})


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
    """Everybody who listens is on loopback and is thrown garbage at; the run is the one that nobody disturbed.

    Ranks are joined by gloo, since nobody listens where they share memory.
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
