"""Measures the links of a mesh: ping-pong between two ranks, and every collective over all ranks.

Each repetition is: barrier, clock, call, wait, synchronise, clock.  Its time is that of the slowest rank; the median
over repetitions is reported.  Before a collective is timed, its result is compared with the known one: a wrong sum is
an error.

    algbw = S / seconds                  S: bytes of the whole array, for reduce-scatter and all-gather too
    busbw = algbw * factor(kind, n)      the rate of a link; comparable between kinds and rank counts

Source: the definitions of nccl-tests (its PERFORMANCE page).
"""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from plait.checkpoint.files.reading import memory
from plait.comm.base import Comm
from plait.messages.wording import human
from plait.run.config.machine import MachineConfig, check_machine, resolve_device
from plait.run.measure.machine import synchronise
from plait.run.measure.operations import COLLECTIVES, NOTE, Collective, build
from plait.table.collectives import bus_factor
from plait.table.mesh import AXES

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"([0-9]{1,12})\s*(|K|M|G)(?:I?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class BenchConfig(MachineConfig):
    """Time messages between ranks: ping-pong, and every collective by size."""

    what: tyro.conf.Positional[Literal["comm"]] = "comm"
    """The thing to time."""
    mesh: str = "shard=2"
    """Ranks on named axes; the collectives run over all of them."""
    sizes: tuple[str, ...] = ("4KB", "64KB", "1MB", "16MB")
    """Sizes of the whole array, in units of 1024."""
    kinds: tuple[Collective, ...] = COLLECTIVES
    """The collectives to time."""
    repeat: int = 20
    """Timed repetitions; the median is reported."""
    warmup: int = 3
    """Calls before the timed ones."""
    json: str | None = None
    """Write the results here as JSON; "-" is the standard output."""


@dataclass(frozen=True)
class Measurement:
    """One line of the result."""

    kind: str
    """``ping_pong``, or a collective's name."""
    ranks: int
    bytes: int
    seconds: float
    """Median over repetitions of the slowest rank's time; ping_pong: one way."""
    seconds_min: float
    seconds_max: float

    @property
    def algbw(self) -> float:
        """Bytes of the whole array per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes per second that a link carried."""
        return self.algbw * (1.0 if self.kind == "ping_pong" else bus_factor(self.kind, self.ranks))


def parse_size(text: str) -> int:
    """Bytes in ``4KB``, ``1 MiB``, ``512`` (K, M and G are powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise ValueError(f"cannot read the size {text!r}: write bytes, as in 512, 4KB, 1MB or 1GB")
    return int(match[1]) * _UNITS[match[2].upper()]


def validate(config: BenchConfig) -> None:
    """Raises ValueError, with the numbers and the fix, for a benchmark that is known to be impossible."""
    check_machine(config)
    mesh = config.parsed_mesh
    if mesh.size < 2:
        raise ValueError(f"the mesh '{mesh}' has 1 rank, which has no one to send to: give 2 or more, as in shard=2")
    need, have = mesh.size * max(map(parse_size, config.sizes), default=0), memory(mesh.size)
    if need > have and resolve_device(config) == "cpu":
        raise ValueError(f"{mesh.size} ranks need {human(need)} for one array each, have {human(have)}: smaller sizes")


def measure(config: BenchConfig, comm: Comm) -> list[Measurement]:
    """All measurements, the same on every rank; every rank of the mesh must call this."""
    sizes = sorted({parse_size(text) for text in config.sizes})
    results = [ping_pong(comm, size, config) for size in sorted({8, *sizes})]  # 8 bytes show the latency
    for kind in config.kinds:
        for size in sizes:
            operation = build(kind, comm, size)
            if size == sizes[0]:
                operation.check()
            results.append(_timed(comm, config, operation.run, kind, comm.mesh.size, operation.bytes))
    return results


def ping_pong(comm: Comm, size: int, config: BenchConfig) -> Measurement:
    """Ranks 0 and 1 send a message of ``size`` bytes back and forth; the others do nothing."""
    numel = max(1, size // 4)
    ball = torch.full((numel,), float(comm.rank == 0), device=comm.device)
    rounds = 10 if size <= 2**16 else 1

    def play() -> None:
        for sender in (0, 1) * rounds if comm.rank < 2 else ():
            (comm.send if comm.rank == sender else comm.recv)(ball, 1 - comm.rank, NOTE).wait()

    result = _timed(comm, config, play, "ping_pong", 2, numel * 4, messages=2 * rounds)
    if comm.rank < 2 and not bool((ball == 1).all()):
        raise RuntimeError(f"a ping-pong message of {numel * 4} bytes came back changed")
    return result


def slowest(comm: Comm, seconds: list[float]) -> list[float]:
    """The largest of all ranks' seconds, one by one."""
    worst = torch.tensor(seconds, dtype=torch.float64, device=comm.device)
    comm.all_reduce(worst, AXES, "max", NOTE).wait()
    found: list[float] = worst.tolist()
    return found


def _timed(
    comm: Comm, config: BenchConfig, work: Callable[[], None], kind: str, ranks: int, size: int, messages: int = 1
) -> Measurement:
    """Repeats ``work`` after its warm-up, and measures seconds for each of its ``messages``."""
    for _ in range(config.warmup):
        work()
    synchronise(comm.device.type)
    times = []
    for _ in range(config.repeat):
        comm.barrier(AXES, NOTE)
        start = time.perf_counter()
        work()
        synchronise(comm.device.type)
        times.append(time.perf_counter() - start)
    seconds = [one / messages for one in slowest(comm, times)]
    return Measurement(kind, ranks, size, statistics.median(seconds), min(seconds), max(seconds))
