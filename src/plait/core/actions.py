"""What a rank does, as data.

An ``Action`` is one thing a rank does for one stage (and one microbatch); a ``Schedule`` is one tuple of
actions per rank.  Time is not in it: how long things take is the simulator's business.  The text form is
exact, so a schedule can be written by hand, printed and compared:

    0F0 0B0 0F1 0B1 0REDUCE 0UPDATE

reads: stage 0, forward and backward of microbatches 0 and 1, reduce the gradients, update the parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"


_NEEDS_MICROBATCH = {Kind.FORWARD, Kind.BACKWARD}


@dataclass(frozen=True)
class Action:
    """One action; ``microbatch`` is -1 for what happens once per step."""

    kind: Kind
    stage: int
    microbatch: int = -1

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < -1:
            raise ValueError(
                f"action {self.kind.name} of stage {self.stage}, microbatch {self.microbatch}: count from 0"
            )
        if (self.microbatch >= 0) != (self.kind in _NEEDS_MICROBATCH):
            raise ValueError(f"action {self.kind.name} of stage {self.stage} with microbatch {self.microbatch}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}" + (str(self.microbatch) if self.microbatch >= 0 else "")


Schedule = tuple[tuple[Action, ...], ...]


def parse_action(text: str) -> Action:
    """``"0F3"`` or ``"0UPDATE"`` as an action."""
    match = re.fullmatch(r"(\d+)([A-Z]+)(\d+)?", text)
    known = {kind.value: kind for kind in Kind}
    if match is None or match[2] not in known:
        raise ValueError(
            f"cannot read the action {text!r}: write stage, kind ({', '.join(known)}) and microbatch, as in 0F3"
        )
    return Action(known[match[2]], int(match[1]), int(match[3]) if match[3] else -1)


def format_schedule(schedule: Schedule) -> str:
    """One line per rank, actions separated by spaces; ``-`` for a rank that does nothing."""
    return "\n".join(" ".join(map(str, line)) or "-" for line in schedule)


def parse_schedule(text: str) -> Schedule:
    """What ``format_schedule`` wrote."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return tuple(() if words == ["-"] else tuple(map(parse_action, words)) for words in lines)
