"""Diagnoses a run from the last records of its ranks and the state of their processes.

    statuses (the page) ──┐
    processes (/proc)   ──┼──►  diagnose  ──►  diagnoses, the cause first  ──►  block: text for the screen
    now, mesh           ──┘

    diagnosis       seen by
    killed          a signal ended its process, or it is gone without a report
    failed          it reported its error, or ended with an exit code above 0
    left            it ended with exit code 0 while another still waited for it
    stopped         the kernel says so (SIGSTOP, a debugger)
    stands still    others have waited a long time for it, and it has not changed since
    crossed         ranks wait for each other in different operations
    straggler       its steps take longer to compute than those of its peers (``straggler.py``)

A rank that ended because another did is an echo, not a diagnosis.  It may be reported first: the kernel closes the
connections of a dying process before it reports the end (``cause``).
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from plait.messages.escape import one_line
from plait.messages.wording import signal_name
from plait.run.watch.page import Status
from plait.run.watch.processes import ProcessState
from plait.run.watch.straggler import stragglers
from plait.table.mesh import Mesh

Kind: TypeAlias = Literal["killed", "failed", "left", "stopped", "stands still", "crossed", "straggler"]

ENDED: frozenset[Kind] = frozenset({"killed", "failed", "left"})
"""Diagnoses after which no step follows."""

STANDING: frozenset[Kind] = frozenset({"stands still", "crossed"})
"""Diagnoses that the rank's stacks explain further."""

LONG = 10.0
"""Seconds of waiting after which the ranks that are waited for are checked."""

MOMENT = 1.0
"""Seconds of waiting for a rank that has left, after which it clearly left too early."""

DYING = 3.0
"""Seconds in which a process whose connections are closed has ended."""

ECHOES = ("ConnectionError", "TimeoutError", "AbortedError")
"""Errors that a rank has because of another one."""


@dataclass(frozen=True)
class Diagnosis:
    """A fault of one rank."""

    kind: Kind
    rank: int
    what: str
    """``was killed by SIGKILL``"""
    where: str
    """``on host a (pid 4711), in step 20, ...``"""
    others: tuple[str, ...] = ()
    """A line for each of the other ranks."""
    stack: str = ""
    """The stacks of its threads, if they were requested."""
    step: int = -1


def diagnose(
    statuses: Sequence[Status],
    processes: Sequence[ProcessState],
    now: float,
    mesh: Mesh | None = None,
    long: float = LONG,
    awake: float = 0.0,
) -> list[Diagnosis]:
    """Finds the faults of a run, the cause first; empty if there are none.

    Args:
        processes: those of the ranks that wrote the statuses, in the same order.
        now: ``time.monotonic()`` on the page's host.
        mesh: the ranks whose computing time is compared; without it there are no stragglers.
        long: seconds of waiting after which the ranks that are waited for are checked.
        awake: the start of this process's uninterrupted run: the ranks may have been stopped with it, so no wait before
            that counts.
    """
    statuses = [s if s.state in ("failed", "done") else replace(s, since=max(s.since, awake)) for s in statuses]
    ranks = {s.rank: (s, p) for s, p in zip(statuses, processes, strict=True) if s.pid}
    lost = [s for s, _ in ranks.values() if s.state == "failed" or (s.state == "waiting" and now > s.since + MOMENT)]
    wanted = {rank for s in lost for rank in s.peers if rank != s.rank}
    ends = sorted(end for s, p in ranks.values() if (end := end_of(s, p, s.rank in wanted)))
    first = [end[2:] for end in ends if end[0] == ends[0][0]]
    echo = bool(ends) and ends[0][0] == _ECHO
    alive = {rank: s for rank, (s, p) in ranks.items() if p.state != "gone" and s.state not in ("failed", "done")}
    found: list[tuple[Kind, int, str]] = [] if echo else first
    found += [
        ("stopped", rank, f"is stopped (SIGSTOP): `kill -CONT {s.pid}` on its host lets it go on")
        for rank, s in sorted(alive.items())
        if ranks[rank][1].state == "stopped" and now > awake + MOMENT  # or it goes on soon after this process
    ]
    found = found or _standing(alive, now, long) or first
    if mesh is not None and not found:
        return [
            Diagnosis("straggler", rank, text, _in(ranks[rank][0]), step=ranks[rank][0].step)
            for rank, text in stragglers(list(alive.values()), mesh)
        ]
    others = {rank: f"rank {rank}: {_does(*ranks[rank], now)}" for rank in sorted(ranks)}
    return [
        Diagnosis(
            *(kind, rank, what, _where(*ranks[rank], now)),
            others=tuple(text for other, text in others.items() if other != rank),
            step=ranks[rank][0].step,
        )
        for kind, rank, what in found
    ]


def cause(look: Callable[[], list[Diagnosis]], beat: Callable[[], None] = lambda: None) -> list[Diagnosis]:
    """Returns what ``look`` finds once that is more than lost connections, or after ``DYING`` seconds; calls ``beat``
    between the looks."""
    end = time.monotonic() + DYING
    while (found := look()) and all(f.what.startswith(_LOST) for f in found) and time.monotonic() < end:
        time.sleep(0.1)
        beat()
    return found


def block(diagnoses: Sequence[Diagnosis]) -> str:
    """Returns the diagnoses as text for a screen; empty if there are none."""
    lines = []
    for diagnosis in diagnoses:
        lines += [f"plait: rank {diagnosis.rank} {diagnosis.what}", f"  {diagnosis.where}"]
        if diagnosis is diagnoses[0]:
            lines += [f"  {text}" for text in diagnosis.others]
        if diagnosis.stack:
            lines += [f"  stack of rank {diagnosis.rank}:", *(f"    {line}" for line in diagnosis.stack.splitlines())]
    return "".join(f"{one_line(line, 400)}\n" for line in lines)


_LOST = "failed: ConnectionError"
_SIGNAL, _ERROR, _GONE, _LEFT, _ECHO = range(5)


def end_of(s: Status, p: ProcessState, wanted: bool = False) -> tuple[int, float, Kind, int, str] | None:
    """Returns (distance from the cause, time, kind, rank, text) of a rank that ended too early, else None."""
    code = p.exit_code
    if s.state == "failed" or (p.state == "gone" and code is not None and code > 0):
        echo = s.error.startswith(ECHOES)
        what = f"failed: {s.error}" if s.error else f"ended with exit code {code}"
        return _ECHO if echo else _ERROR, s.since, "failed", s.rank, what
    if p.state != "gone":
        return None if s.state != "done" or not wanted else (_LEFT, s.since, "left", s.rank, "left before the others")
    if code == 0 or s.state == "done":
        what = "left before the others, with exit code 0" if code == 0 else "left before the others"
        return (_LEFT, s.since, "left", s.rank, what) if wanted else None
    if code is None:
        if s.signal:
            return _ECHO, s.since, "killed", s.rank, f"was ended by {signal_name(s.signal)}"
        return _GONE, s.since, "killed", s.rank, "is gone without a word: killed, or ended by os._exit"
    memory = ": the kernel says that memory ran out" if p.out_of_memory else ""
    return (
        *(_ECHO if -code == signal.SIGTERM else _SIGNAL, s.since, "killed", s.rank),
        f"was killed by {signal_name(-code)}{memory}",
    )


def _standing(alive: dict[int, Status], now: float, long: float) -> list[tuple[Kind, int, str]]:
    """Finds the ranks for which others have waited for long: one that computes, or several that wait for each other."""
    waiting = {rank: s for rank, s in alive.items() if s.state == "waiting" and now - s.since >= long}
    wanted = {rank for s in waiting.values() for rank in s.peers if rank in alive}
    busy = [rank for rank in sorted(wanted) if alive[rank].state != "waiting"]
    still = [rank for rank in busy if now - alive[rank].since >= long]
    if busy:
        return [("stands still", rank, f"has stood still for {now - alive[rank].since:.0f} s") for rank in still]
    if not wanted or not wanted <= waiting.keys():
        return []
    operations = Counter(waiting[rank].operation for rank in wanted)
    if len(operations) == 1:
        return []
    most, _ = operations.most_common(1)[0]
    odd = next(rank for rank in sorted(wanted) if waiting[rank].operation != most)
    return [("crossed", odd, "waits in a different operation from the others: the program took different paths")]


def _where(s: Status, p: ProcessState, now: float) -> str:
    ended = p.state == "gone" or s.state in ("failed", "done")
    seconds = f"{max(0.0, now - s.since):.1f} s"
    when = f"{seconds} ago" if ended else f"for {seconds}"
    return f"on host {s.host} (pid {s.pid}), {_in(s, ' (counted from 0)')}, {when}"


def _in(s: Status, counted: str = "") -> str:
    step = f"in step {s.step}{counted}" if s.step >= 0 else "before its first step"
    if not s.operation:
        return step
    return f"{step}, {'waiting for' if s.state == 'waiting' else 'computing after'} {s.operation}"


def _does(s: Status, p: ProcessState, now: float) -> str:
    """Describes one of the other ranks, in a line."""
    if s.state == "failed":
        return f"failed: {s.error}" if s.error else "failed"
    if p.state == "gone":
        code = p.exit_code or 0
        how = f" with {signal_name(-code) if code < 0 else f'exit code {code}'}"
        return f"ended{'' if p.exit_code is None else how}"
    if s.state == "done":
        return "done"
    stopped = "stopped, " if p.state == "stopped" else ""
    since = f"for {max(0.0, now - s.since):.1f} s"
    whom = ", ".join(str(rank) for rank in s.peers if rank != s.rank)
    if s.state == "waiting" and whom:
        return f"{stopped}waits for rank {whom} {_in(s).replace('waiting for', 'in')}, {since}"
    return f"{stopped}{_in(s)}, {since}"
