"""Compares the ranks' descriptions of each operation before it runs: ``--check-collectives``.

    rank 0   all_reduce of 8 x float32, at line 10 ──┐        ┌── rank 1   all_reduce of 4 x float32, at line 12
                                                     └─ send ─┘
             both raise MismatchError, with both descriptions and both lines; no tensor was touched

Each rank sends its description to all members, then receives theirs; a collective begins when all mean the same.  So
it waits where it is called, as among threads.  A rank that finds a difference informs all others, so that none waits
for it.  Messages between stages are the library's own, and are not compared.
"""

from __future__ import annotations

import contextlib
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from plait.comm.base import Comm
from plait.comm.observer import Observer
from plait.comm.operation import MismatchError, Operation, name_of

PLAIT: Final = str(Path(__file__).parents[2]) + "/"
COMM: Final = f"{PLAIT}comm/"
BETWEEN: Final = (COMM, f"{PLAIT}run/injection/", __file__)
"""The code between the line that asks for an operation and this check."""
TORCH: Final = str(Path(torch.__file__).parent) + "/"
STANDARD: Final = sysconfig.get_paths()["stdlib"] + "/"

Fields = Mapping[str, str | int]
END: Final = "end"
"""The only field of a description that reports a difference."""


@dataclass(frozen=True)
class Description:
    """One rank's description of an operation."""

    text: str
    """The text that errors show."""
    fields: Fields
    """The facts that members must agree on, by name."""

    @classmethod
    def of(cls, operation: Operation, number: int, site: str) -> Description:
        """The ``number``-th operation of some ranks, and the line that asks for it."""
        note, group = operation.note, operation.group
        meant: dict[str, str | int] = {
            "operation": operation.kind,
            "axes": ", ".join(group.axes),
            "elements": operation.numel,
            "dtype": name_of(operation.dtype),
            "reduction": operation.op,
            "root": group.ranks[operation.root] if operation.root >= 0 else -1,
            "phase": note.phase,
            "unit": note.unit,
            "microbatch": note.microbatch,
            "number": number,
        }
        if operation.root < 0:  # a root may have its own line
            meant["line"] = site
        return cls(f"{operation} at {site}", meant)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The description as two messages: the size of the second, and all of it as JSON."""
        data = bytearray(json.dumps([self.text, self.fields]).encode())
        return torch.tensor([len(data)]), torch.frombuffer(data, dtype=torch.uint8)


class CollectiveCheck(Observer):
    """Compares one rank's operations with those of the others."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.failure = comm, ""
        self._asked: Counter[tuple[int, ...]] = Counter()

    def asked(self, operation: Operation) -> None:
        """Raises MismatchError on every member if they do not all mean the same collective."""
        if self.failure:
            raise MismatchError(f"rank {self.comm.rank} in {operation}: {self.failure}")
        if operation.kind not in ("send", "recv"):
            members = tuple(sorted(operation.group.ranks))
            self._asked[members] += 1
            self._compare(operation, Description.of(operation, self._asked[members], call_site()))

    def _compare(self, operation: Operation, mine: Description) -> None:
        others = [rank for rank in operation.group.ranks if rank != self.comm.rank]
        works = [self.comm._tell(operation, row, other) for other in others for row in mine.rows()]
        found = {self.comm.rank: mine}
        for other in others:
            try:
                theirs = self._hear(operation, other)
            except (OSError, MismatchError):
                if all(one.fields == mine.fields for one in found.values()):
                    raise
                break  # more will not be known
            found[other] = theirs
            if set(str(theirs.fields.get("axes")).split(", ")) != set(operation.group.axes):
                break  # a member may already be in it, and send no more
        if problem := difference(found):
            raise self._fail(operation, found, problem)
        for work in works:  # a member that has sent its description reads ours
            work.wait()

    def _hear(self, operation: Operation, src: int) -> Description:
        """Receives the description of a rank's next collective."""
        self.comm._hear(operation, size := torch.empty(1, dtype=torch.int64), src)
        self.comm._hear(operation, row := torch.empty(int(size), dtype=torch.uint8), src)
        heard = Description(*json.loads(row.numpy().tobytes()))
        if END in heard.fields:
            raise self._told(heard.text, operation)
        return heard

    def _fail(self, operation: Operation, found: Mapping[int, Description], problem: str) -> MismatchError:
        """Makes the error of this rank, and informs all others of it."""
        lines = [f"  rank {rank}: {found[rank].text}" for rank in sorted(found)]
        return self._told("\n".join([problem, *lines]), operation)

    def _told(self, text: str, operation: Operation) -> MismatchError:
        self.failure = text
        with contextlib.suppress(RuntimeError, OSError):  # a world that is broken already
            for other in range(self.comm.world_size):
                for row in Description(text, {END: 1}).rows() if other != self.comm.rank else ():
                    self.comm._tell(operation, row, other)
        self.comm._abandon(text)
        return MismatchError(text)


def check_collectives(comm: Comm) -> Comm:
    """Makes ``comm`` compare every operation with the other ranks from now on; all of them call it."""
    comm.observers += (CollectiveCheck(comm),)
    return comm


def difference(found: Mapping[int, Description]) -> str:
    """The difference between the descriptions of some ranks, in one sentence; "" if there is none."""
    names = dict.fromkeys(name for one in found.values() for name in one.fields)
    differing = [name for name in names if len({one.fields.get(name) for one in found.values()}) > 1]
    if not differing:
        return ""
    return f"ranks {', '.join(map(str, sorted(found)))} mean different collectives (other {', '.join(differing)})"


def call_site() -> str:
    """The calling line: the innermost outside ``plait.comm`` (and injected faults, which wrap it), and, if that is
    plait's, the line outside plait that led there."""
    inner, frame = "", sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if file.startswith(BETWEEN) or (inner and _is_library(file)):
            continue
        line = f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        if not file.startswith(PLAIT):
            return f"{inner}, called from {line}" if inner else line
        inner = inner or line
    return inner


def _is_library(file: str) -> bool:
    standard = file.startswith(STANDARD) and "/site-packages/" not in file
    return standard or file.startswith((PLAIT, TORCH, "<"))
