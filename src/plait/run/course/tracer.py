"""Steps through a file on every rank of a thread world and notes which local variables each line changed.

    body(comm) on each thread ──► sys.settrace, in frames of this file only ──► per rank: line, changes, operations
                                                                           ──► frames: one step index per rank

Ranks are aligned at collectives, by the number of their lines in the ledger.  Between two collectives all ranks advance
together; where they send messages to each other, in the order in which they did.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.thread import run
from plait.table.mesh import Mesh

MOST_STEPS = 3000
"""Steps of a rank that are kept; the rest of the program runs unseen."""
ROWS, COLUMNS = 4, 8
"""The corner of a tensor whose values are shown."""
LONGEST = 120
MESSAGES = ("send", "recv")
Shown = dict[str, Any]
"""A value as JSON: ``text``, and for a tensor ``rows`` of numbers and its ``bytes``."""


@dataclass
class RankTrace:
    """The steps of one rank, in order."""

    steps: list[Shown] = field(default_factory=list)
    """Line, function, depth, ``changed`` (name to value, None where it has gone), number of ledger lines, order."""
    operations: list[str] = field(default_factory=list)
    """The ledger's lines, as text."""
    sent: list[int] = field(default_factory=list)
    """Bytes sent up to and with each operation."""
    collectives: list[int] = field(default_factory=list)
    """Collectives among the first n operations, for each n."""


def trace(file: str, body: Callable[[Comm], object], mesh: Mesh) -> list[RankTrace]:
    """Runs ``body`` on every rank and returns their steps in frames of ``file``, as Python names it.

    Raises:
        Exception: what the body raised on the first rank that failed.
    """
    clock, source = itertools.count(), file

    def traced(comm: Comm) -> RankTrace:
        found = RankTrace()
        before: dict[int, dict[str, Shown]] = {}

        def note(frame: FrameType, event: str, value: object) -> Any:
            if len(found.steps) < MOST_STEPS and event in ("line", "return"):
                values = {name: shown for name, shown in _locals(frame) if shown is not None}
                last = before.get(id(frame), {})
                changed: dict[str, Shown | None] = {n: v for n, v in values.items() if last.get(n) != v}
                changed |= dict.fromkeys(last.keys() - values.keys())
                before[id(frame)] = values
                found.steps.append(
                    {
                        "line": frame.f_lineno,
                        "function": frame.f_code.co_name,
                        "frame": _depth(frame, source),
                        "ends": event == "return",
                        "changed": changed,
                        "operations": len(comm.ledger),
                        "order": next(clock),
                    }
                )
            if event == "return":
                before.pop(id(frame), None)
            return note

        def enter(frame: FrameType, event: str, value: object) -> Any:
            return note if frame.f_code.co_filename == source and frame.f_code.co_name != "<lambda>" else None

        sys.settrace(enter)
        try:
            body(comm)
        finally:
            sys.settrace(None)
        total = collectives = 0
        found.collectives.append(0)
        for entry in comm.ledger:
            total += entry.sent
            collectives += entry.kind not in MESSAGES
            over = f" over {', '.join(entry.axes)}" if entry.axes else ""
            found.operations.append(f"{entry.kind}{over}, {entry.bytes} bytes, this rank sends {entry.sent}")
            found.sent.append(total)
            found.collectives.append(collectives)
        return found

    with torch.random.fork_rng(devices=[]):
        return run(mesh, traced)


def _depth(frame: FrameType, source: str) -> int:
    """The number of frames of the file around this one."""
    depth, around = 0, frame.f_back
    while around is not None:
        depth += around.f_code.co_filename == source
        around = around.f_back
    return depth


def _locals(frame: FrameType) -> Iterator[tuple[str, Shown | None]]:
    for name, value in list(frame.f_locals.items()):
        if not name.startswith(("_", "@", ".")):
            yield name, show(value)


def show(value: object, *, inside: bool = False) -> Shown | None:
    """A value as JSON; None for what explains nothing (functions, modules of Python, classes)."""
    if isinstance(value, ModuleType | FunctionType | type):
        return None
    if isinstance(value, Tensor):
        return _tensor(value)
    if value is None or isinstance(value, bool | int | float | str):
        return {"text": repr(value)[:LONGEST]}
    if isinstance(value, Comm):
        return {"text": f"rank {value.rank} of {value.world_size}"}
    if isinstance(value, list | tuple | dict) and not inside:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [(key, show(one, inside=True)) for key, one in itertools.islice(items, 6)]
        named = isinstance(value, dict)
        words = [f"{key!r}: {shown['text']}" if named else shown["text"] for key, shown in parts if shown]
        return {"text": f"{type(value).__name__} of {len(value)}: {'; '.join(words)}"[: 3 * LONGEST]}
    return {"text": type(value).__name__}


def _tensor(value: Tensor) -> Shown:
    """Shape and dtype, and a corner of the values, where it has any: a freed buffer has none."""
    text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    try:
        plain = value.detach()
        storage = plain.untyped_storage()
        if value.is_meta or storage.nbytes() < (plain.storage_offset() + plain.numel()) * plain.element_size():
            return {"text": f"{text}, no values here"}
        corner = plain.reshape(-1, plain.shape[-1] if plain.dim() > 1 else max(1, plain.numel()))[:ROWS, :COLUMNS]
        rows = [[_number(number) for number in row] for row in corner.double().tolist()]
        return {"text": text, "rows": rows, "bytes": storage.nbytes(), "sum": f"{plain.double().sum().item():.6g}"}
    except (RuntimeError, ValueError, TypeError, NotImplementedError):  # a parameter that is not gathered
        return {"text": f"{text}, no values here"}


def _number(value: float) -> float | str:
    """Rounds a number; JSON has no infinities, so these are words."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def align(ranks: list[RankTrace]) -> list[list[int]]:
    """One step index per rank for each frame of the page."""
    at = [0] * len(ranks)
    frames: list[list[int]] = []
    sections = [
        [rank.collectives[min(step["operations"], len(rank.operations))] for step in rank.steps] for rank in ranks
    ]
    for section in range(max((max(s, default=0) for s in sections), default=0) + 1):
        spans = [[i for i, s in enumerate(of_rank) if s == section] for of_rank in sections]
        if _sends(ranks, spans):
            moves = sorted((ranks[r].steps[i]["order"], r, i) for r, span in enumerate(spans) for i in span)
            for _, r, i in moves:
                at[r] = i
                frames.append(list(at))
            continue
        for k in range(max(map(len, spans), default=0)):
            at = [span[min(k, len(span) - 1)] if span else at[r] for r, span in enumerate(spans)]
            frames.append(list(at))
    return frames


def _sends(ranks: list[RankTrace], spans: list[list[int]]) -> bool:
    """True if a rank sends or receives a message in these steps."""
    for rank, span in zip(ranks, spans, strict=True):
        if span:
            first, last = (rank.steps[i]["operations"] for i in (span[0], span[-1]))
            if any(text.startswith(MESSAGES) for text in rank.operations[first : last + 1]):
                return True
    return False
