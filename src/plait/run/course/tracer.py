"""Steps through a file on every rank and notes which local variables each line changed.

    body(comm) on each rank ──► sys.settrace, in frames of this file only ──► per rank: line, changes, messages, memory
                                                                          ──► merge.py: one step index per rank

A rank's record is plain data: a process writes it as JSON, and the records of all ranks are one page.
"""

import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from plait.comm import Comm
from plait.comm.observer import Observer
from plait.comm.operation import Operation
from plait.comm.run_threads import run
from plait.run.course.markers import Markers, markers, read
from plait.run.course.memory import HeldBytes
from plait.run.course.values import Shown, show
from plait.table.mesh import Mesh

MOST_STEPS = 3000
"""The number of a rank's steps that are kept; the rest of the program runs unseen."""


@dataclass
class RankTrace:
    """The record of one rank: its steps and its messages, in order."""

    name: str = ""
    """The rank's coordinates on the axes that the mesh has: ``replica 1, shard 0``."""
    steps: list[Shown] = field(default_factory=list)
    """Line, function, depth, ``changed`` (name to value, None if it is gone), number of operations, bytes held, text
    printed since the last step, time."""
    operations: list[Shown] = field(default_factory=list)
    """Kind, axes, bytes of the whole, bytes that this rank sends, ranks (a message: sender, receiver), root."""
    peak: int = 0
    """The largest number of bytes held at once."""


class _Asked(Observer):
    """Notes the operations of one rank as they are asked for."""

    def __init__(self, comm: Comm, noted: list[Shown]) -> None:
        self._comm, self._noted = comm, noted

    def asked(self, operation: Operation) -> None:
        ledger, ranks = self._comm.ledger, operation.group.ranks
        entry = ledger.since(len(ledger) - 1)[0]
        noted = {"kind": entry.kind, "axes": list(entry.axes), "bytes": entry.bytes, "sent": entry.sent}
        root = ranks[operation.root] if operation.root >= 0 else None
        self._noted.append(noted | {"ranks": list(ranks), "root": root})


class _Said:
    """A standard output that keeps each rank's text apart."""

    def __init__(self, outer: Any) -> None:
        self._outer, self._rank = outer, threading.local()

    def write(self, text: str) -> int:
        kept = getattr(self._rank, "kept", None)
        return int(self._outer.write(text)) if kept is None else kept.append(text) or len(text)

    def flush(self) -> None:
        self._outer.flush()

    def keep(self) -> list[str]:
        """Starts to collect this thread's text, and returns the list."""
        kept: list[str] = []
        self._rank.kept = kept
        return kept


class _Follower:
    """The trace function of one rank."""

    def __init__(self, comm: Comm, file: str, marked: Markers, held: HeldBytes, said: list[str]) -> None:
        axes = comm.mesh.coordinates(comm.rank).items()
        self.found = RankTrace(", ".join(f"{axis} {at}" for axis, at in axes if comm.mesh.axis(axis) > 1))
        self._file, self._marked, self._held, self._said = file, marked, held, said
        self._before: dict[int, dict[str, Shown]] = {}
        self._lines: dict[int, int] = {}
        self._watched: dict[int, dict[str, Any]] = {}

    def enter(self, frame: FrameType, event: str, value: object) -> Any:
        if frame.f_code.co_filename != self._file or frame.f_code.co_name.startswith("<"):
            return None
        return None if any(outer.f_lineno in self._marked.over for outer in self._around(frame)) else self.note

    def note(self, frame: FrameType, event: str, value: object) -> Any:
        if event in ("line", "return") and len(self.found.steps) < MOST_STEPS:
            last, self._lines[id(frame)] = self._lines.get(id(frame), 0), frame.f_lineno
            self._watched.setdefault(id(frame), {}).update(self._marked.inspect.get(last, {}))
            if frame.f_lineno not in self._marked.hidden or event == "return":
                self._step(frame, event == "return")
        if event == "return":
            for kept in (self._before, self._lines, self._watched):
                kept.pop(id(frame), None)
        return self.note

    def _step(self, frame: FrameType, ends: bool) -> None:
        self._held.counts = False
        values = dict(self._shown(frame))
        self._held.counts = True
        last = self._before.get(id(frame), {})
        changed: dict[str, Shown | None] = {name: one for name, one in values.items() if last.get(name) != one}
        changed |= dict.fromkeys(last.keys() - values.keys())
        self._before[id(frame)] = values
        step = {
            "line": frame.f_lineno,
            "function": frame.f_code.co_name,
            "frame": sum(1 for _ in self._around(frame)),
            "ends": ends,
            "changed": changed,
            "operations": len(self.found.operations),
            "held": self._held.bytes(),
            "time": time.monotonic_ns(),
        }
        if self._said:
            step["said"] = "".join(self._said)
            self._said.clear()
        self.found.steps.append(step)

    def _shown(self, frame: FrameType) -> Iterator[tuple[str, Shown]]:
        names = ChainMap(dict(frame.f_locals), frame.f_globals)
        for expression, node in self._watched.get(id(frame), {}).items():
            try:
                shown = show(read(node, names), file=self._file)
            except Exception as error:  # an expression of the file's author, which may not hold yet
                shown = {"text": f"{type(error).__name__}: {error}"[:120]}
            yield f"@ {expression}", shown or {"text": "not shown"}
        for name, value in list(frame.f_locals.items()):
            if not name.startswith(("_", "@", ".")) and name not in self._marked.names:
                shown = show(value, file=self._file)
                if shown is not None:
                    yield name, shown

    def _around(self, frame: FrameType) -> Iterator[FrameType]:
        """The frames of the file around this one."""
        frames = (around for around, _ in walk_stack(frame.f_back))
        return (around for around in frames if around.f_code.co_filename == self._file)


def follow(comm: Comm, file: str, body: Callable[[Comm], object], said: _Said) -> RankTrace:
    """Runs ``body`` on this rank and returns its record."""
    marked = markers(Path(file).read_text(encoding="utf-8"), Path(file).name)
    held = HeldBytes()
    follower = _Follower(comm, file, marked, held, kept := said.keep())
    observer = _Asked(comm, follower.found.operations)
    comm.observers = (*comm.observers, observer)
    sys.settrace(follower.enter)
    try:
        with held:
            body(comm)
    finally:
        sys.settrace(None)
        comm.observers = tuple(one for one in comm.observers if one is not observer)
    found = follower.found
    if kept and found.steps:  # printed in code that is not followed, or after the last step that is kept
        found.steps[-1]["said"] = found.steps[-1].get("said", "") + "".join(kept)
    found.peak = held.peak
    return found


@contextmanager
def ranks_apart() -> Iterator[_Said]:
    """Keeps the ranks' printed texts apart inside the block."""
    before, said = sys.stdout, _Said(sys.stdout)
    sys.stdout = said
    try:
        yield said
    finally:
        sys.stdout = before


def trace(file: str, body: Callable[[Comm], object], mesh: Mesh) -> list[RankTrace]:
    """Runs ``body`` on every rank of a thread world and returns their steps in frames of ``file``, as Python names it,
    or raises the error of the body on the first rank that failed."""
    with torch.random.fork_rng(devices=[]), ranks_apart() as said:
        return run(mesh, lambda comm: follow(comm, file, body, said))
