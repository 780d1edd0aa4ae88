"""Compares what each rank means by an operation before it runs: ``--check-collectives``.

    rank 0   all_reduce of 8 x float32, at line 10 ──┐        ┌── rank 1   all_reduce of 4 x float32, at line 12
                                                     └─ tell ─┘
             both raise MismatchError, with both descriptions and both lines; no tensor was touched

From each rank to each other goes one stream of descriptions, in the order in which the sender asks:

    collective   sent to all members, then received from each: none begins before all mean the same
    message      sent ahead of it by the sender, received and compared where the receiver waits

So a collective waits where it is asked for, as among threads, and a message no sooner than without the check.  A rank
that waits for a message says so to its sender.  If the sender reads that while it waits for this very rank, in a
collective or for another message, then neither will ever proceed.  A rank that has found a difference informs all
others, so that none waits for it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import sysconfig
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from plait.comm.base import Comm
from plait.comm.operation import MismatchError, Operation, Work, advice, label, name_of

ROW_BYTES = 2048
"""Bytes of a description in a message."""

LONGEST = 150
"""Most bytes of a part of a description; a longer one is compared by its checksum.  (Bytes are those of JSON.)"""

LONGEST_TEXT = 600
"""Most bytes of the text of a description."""

MOST_UNREAD = 256
"""Descriptions to one rank that it may not have read yet; one more waits for the oldest."""

PLAIT: Final = str(Path(__file__).parents[2]) + "/"
COMM: Final = f"{PLAIT}comm/"
BETWEEN: Final = (COMM, f"{PLAIT}run/injection/", __file__)
"""The code between the line that asks for an operation and this check."""
TORCH: Final = str(Path(torch.__file__).parent) + "/"
STANDARD: Final = sysconfig.get_paths()["stdlib"] + "/"

Fields = Mapping[str, str | int]
Role = Literal["collective", "message", "waits", "end"]
"""The subject of a description: the last two are a receive that is waited for, and a difference that was found."""


@dataclass(frozen=True)
class Description:
    """One rank's meaning of an operation."""

    text: str
    """The text that errors show."""
    fields: Fields
    """The facts that members must agree on, by name."""
    role: Role = "collective"

    @classmethod
    def of(cls, operation: Operation, number: int, what: str) -> Description:
        """The ``number``-th operation of some ranks; ``what`` is the form of a message's tensor."""
        note, group, text = operation.note, operation.group, _without_middle(str(operation), LONGEST_TEXT)
        about: dict[str, str | int] = {
            "phase": _short(note.phase),
            "unit": _short(note.unit),
            "microbatch": note.microbatch,
        }
        if operation.kind in ("send", "recv"):
            return cls(text, {"tensor": _short(what), **about}, "message")
        meant: dict[str, str | int] = {
            "operation": operation.kind,
            "axes": ", ".join(group.axes),
            "elements": operation.numel,
            "dtype": name_of(operation.dtype),
            "reduction": operation.op,
            "root": group.ranks[operation.root] if operation.root >= 0 else -1,
            **about,
            "number": number,
        }
        if operation.root < 0:  # a root may have a line of its own
            meant["line"] = _short(operation.site)
        return cls(text, meant)

    def as_row(self) -> Tensor:
        """The description as a message of fixed size, with all fields."""
        room = ROW_BYTES - len(json.dumps(["", self.fields, self.role])) + len('""')
        data = json.dumps([_without_middle(self.text, room), self.fields, self.role]).encode()
        return torch.frombuffer(bytearray(data.ljust(ROW_BYTES)), dtype=torch.uint8)

    @classmethod
    def read(cls, row: Tensor) -> Description:
        return cls(*json.loads(row.numpy().tobytes()))


class CollectiveCheck:
    """Compares what one rank asks for with what the others do."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.failure = comm, ""
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._sent: Counter[int] = Counter()
        """Number of messages to each rank."""
        self._received: Counter[int] = Counter()
        """Number of messages that were asked for, by sender."""
        self._heard: Counter[int] = Counter()
        """Number of messages whose descriptions were received, by sender."""
        self._untaken: dict[tuple[int, int], Description] = {}
        """The descriptions of messages that this rank has not waited for yet, by sender and number."""
        self._unread: dict[int, deque[Work]] = {}
        self._last: dict[int, Work] = {}
        """The description of the last message to each rank."""

    def begin(self, operation: Operation, what: Sequence[Tensor | int | None]) -> Operation:
        """Before an operation runs: returns it with the place where it was asked for.

        Raises:
            MismatchError: on every member, of a collective that they do not all mean.
        """
        if self.failure:
            raise MismatchError(f"rank {self.comm.rank} in {operation}: {self.failure}")
        operation = replace(operation, site=call_site())
        ranks, rank = operation.group.ranks, self.comm.rank
        if operation.kind == "send":
            self._sent[ranks[1]] += 1
            self._last[ranks[1]] = self._tell(operation, Description.of(operation, 0, _form(what)), ranks[1])
        elif operation.kind != "recv":
            members = tuple(sorted(ranks))
            self._asked[members] += 1
            mine = Description.of(operation, self._asked[members], "")
            for other in ranks:
                if other != rank:
                    self._tell(operation, mine, other)
            self._compare(operation, mine)
        return operation

    def receive(self, operation: Operation, what: Sequence[Tensor | int | None], work: Work) -> Work:
        """A receive that was started, compared with the message where it is waited for."""
        src = operation.group.ranks[0]
        self._received[src] += 1
        return CheckedReceive(self, operation, Description.of(operation, 0, _form(what)), work, self._received[src])

    def compare_message(self, operation: Operation, number: int, mine: Description) -> None:
        """Raises MismatchError where the ``number``-th message of a rank is not what this rank receives."""
        src, dst = operation.group.ranks
        if self._heard[src] < number and len(self._unread.get(src, ())) < MOST_UNREAD:
            self._tell(operation, Description(mine.text, {"number": number}, "waits"), src)
        while self._heard[src] < number:
            if (theirs := self._hear(operation, src, mine)).role == "collective":
                raise self._waits_for_nothing(operation, dst, {src: theirs, dst: mine})
            self._keep(src, theirs)
        found = {src: self._untaken.pop((src, number)), dst: mine}
        if problem := difference(found):
            raise self._fail(operation, found, problem)

    def leave(self) -> None:
        """Before this rank leaves: stays until its messages are read, or for its deadline.

        An unread message is no error here: it was taken in, or its own wait has raised the reason.
        """
        with contextlib.suppress(OSError):
            for work in self._last.values():  # a rank that has read this one has read all before it
                work.wait()

    # ---- one stream to each rank, and one from it -------------------------------------------------------------------

    def _compare(self, operation: Operation, mine: Description) -> None:
        found = {self.comm.rank: mine}
        for other in operation.group.ranks:
            if other == self.comm.rank:
                continue
            try:
                while (theirs := self._hear(operation, other, mine)).role == "message":
                    self._keep(other, theirs)
            except (OSError, MismatchError):
                if all(one.fields == mine.fields for one in found.values()):
                    raise
                break  # more will not be known
            found[other] = theirs
            if set(str(theirs.fields.get("axes")).split(", ")) != set(operation.group.axes):
                break  # a member may be in it, and come no more
        if problem := difference(found):
            raise self._fail(operation, found, problem)
        for other in operation.group.ranks:  # who has told us its own reads ours
            for work in self._unread.pop(other, ()):
                work.wait()

    def _keep(self, src: int, message: Description) -> None:
        self._heard[src] += 1
        self._untaken[src, self._heard[src]] = message

    def _tell(self, operation: Operation, description: Description, dst: int) -> Work:
        unread = self._unread.setdefault(dst, deque())
        unread.append(work := self.comm._tell(operation, description.as_row(), dst))
        if len(unread) > MOST_UNREAD:
            unread.popleft().wait()
        return work

    def _hear(self, operation: Operation, src: int, mine: Description) -> Description:
        """The next collective or message of a rank, for which this one waits in ``mine``."""
        while True:
            row = torch.empty(ROW_BYTES, dtype=torch.uint8)
            self.comm._hear(operation, row, src)
            heard = Description.read(row)
            if heard.role == "end":
                raise self._told(heard.text, operation)
            if heard.role != "waits":
                return heard
            if int(heard.fields["number"]) > self._sent[src]:
                raise self._waits_for_nothing(operation, src, {self.comm.rank: mine, src: heard})

    def _waits_for_nothing(self, operation: Operation, waiting: int, found: Mapping[int, Description]) -> MismatchError:
        [other] = found.keys() - {waiting}
        problem = f"rank {waiting} waits for a message of rank {other}, which is in a collective with it instead"
        if found[other].role != "collective":
            problem = f"ranks {min(found)} and {max(found)} wait for a message of each other"
        return self._fail(operation, found, problem)

    def _fail(self, operation: Operation, found: Mapping[int, Description], problem: str) -> MismatchError:
        """Makes the error of this rank, and informs all others of it."""
        lines = [f"  rank {rank}: {found[rank].text}" for rank in sorted(found)]
        problem += advice((one.fields.get("phase"), one.fields.get("unit")) for one in found.values())
        return self._told("\n".join([problem, *lines]), operation)

    def _told(self, text: str, operation: Operation) -> MismatchError:
        self.failure, row = text, Description(text, {}, "end").as_row()
        with contextlib.suppress(RuntimeError, OSError):  # a world that is broken already
            for other in range(self.comm.world_size):
                if other != self.comm.rank:
                    self.comm._tell(operation, row, other)
        self.comm._abandon(text)
        return MismatchError(text)


class CheckedReceive:
    """A message whose description is compared before it is waited for."""

    def __init__(
        self, check: CollectiveCheck, operation: Operation, mine: Description, work: Work, number: int
    ) -> None:
        self._check, self._operation, self._mine, self._work, self._number = check, operation, mine, work, number
        self._compared = False

    def wait(self) -> None:
        if not self._compared:
            self._compared = True
            self._check.compare_message(self._operation, self._number, self._mine)
        self._work.wait()


def check_collectives(comm: Comm) -> Comm:
    """From here on ``comm`` compares every operation with the other ranks, all of which do the same."""
    comm.check = CollectiveCheck(comm)
    return comm


def difference(found: Mapping[int, Description]) -> str:
    """The difference between the descriptions of some ranks, in one sentence; "" where there is none."""
    names = dict.fromkeys(name for one in found.values() for name in one.fields)
    differing = [name for name in names if len({one.fields.get(name) for one in found.values()}) > 1]
    if not differing:
        return ""
    what = next(iter(found.values())).role
    return f"ranks {', '.join(map(str, sorted(found)))} mean different {what}s (other {', '.join(differing)})"


def call_site() -> str:
    """The line that asks: the innermost outside of ``plait.comm`` (and of injected faults, which wrap it), and, where
    that is plait's, the line outside of it that led there."""
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


def _short(text: str) -> str:
    """The form in which a text is compared: itself, or its checksum."""
    data = json.dumps(text)
    return text if len(data) <= LONGEST else f"{len(text)} letters, {zlib.crc32(data.encode()):08x}"


def _without_middle(text: str, most: int) -> str:
    """A text of at most so many bytes."""
    kept, end = text, len(text)
    while len(json.dumps(kept)) > most:
        end = end * 2 // 3
        kept = f"{text[:end]} ... {text[-end:]}"
    return kept


def _form(what: Sequence[Tensor | int | None]) -> str:
    """The form of a message's tensor."""
    tensor, *_ = what
    assert isinstance(tensor, Tensor)
    return label(tensor)
