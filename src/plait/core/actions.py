"""What a rank does, as data.

An ``Action`` is one thing a rank does for one stage (and one microbatch); a ``Schedule`` is one tuple of
actions per rank.  Time is not in it: how long things take is the simulator's business.  The text form is
exact, so a schedule can be written by hand, printed and compared:

    0F0 0B0 0F1 0B1 0REDUCE 0UPDATE

reads: stage 0, forward and backward of microbatches 0 and 1, reduce the gradients, update the parameters.  Two stages:

    0F0 0SEND_F0 0RECV_B0 0B0              rank 0   SEND_F0 ──►  what stage 1 receives as RECV_F0
    1RECV_F0 1F0 1B0 1SEND_B0              rank 1   RECV_B0 ◄──  what stage 1 sends as SEND_B0

A full backward (B) may be split in an input part (I), on which the stage before waits, and a weight part (W), on which
nobody waits.  Messages are *started* by their action and never waited for: a receive is posted, and the pass that
needs it waits.  Each direction between two ranks is a channel of its own, first in, first out.  Messages joined by
``+`` (``0SEND_F1+0RECV_B0``) start together, as one exchange with one rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    REDUCE = "REDUCE"
    """Once per step: from the gradients' cell to the optimizer's."""
    UPDATE = "UPDATE"
    INPUT = "I"
    """The part of a backward that makes the gradient of the stage's input."""
    WEIGHT = "W"
    """The part of a backward that makes the gradients of the stage's weights."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    """Once per microbatch: from a full gradient, pending over all data axes, to the gradients' cell."""


PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
"""What computes."""
MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
"""What moves an activation (F) to the next stage or its gradient (B) to the stage before."""
ACTIVATION, GRADIENT, TIED = "activation", "gradient", "tied"
"""How the ledger calls the phases of messages between stages, for those who send and who predict."""
_NEEDS_MICROBATCH = PASSES | MESSAGES | {Kind.REDUCE_GRAD}


@dataclass(frozen=True)
class Action:
    """One action; ``microbatch`` is -1 for what happens once per step."""

    kind: Kind
    stage: int
    microbatch: int = -1
    also: tuple[Action, ...] = ()
    """Messages that start together with this one, which is a message as well."""

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < -1:
            raise ValueError(
                f"action {self.kind.name} of stage {self.stage}, microbatch {self.microbatch}: count from 0"
            )
        if (self.microbatch >= 0) != (self.kind in _NEEDS_MICROBATCH):
            raise ValueError(f"action {self.kind.name} of stage {self.stage} with microbatch {self.microbatch}")
        if self.also and not all(part.kind in MESSAGES and (part is self or not part.also) for part in self.all):
            raise ValueError(f"'{self}': only messages can be joined by '+'")

    @property
    def all(self) -> tuple[Action, ...]:
        """This action and those joined to it."""
        return (self, *self.also) if self.also else (self,)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The single actions of this one."""
        return (replace(self, also=()), *self.also) if self.also else (self,)

    def __str__(self) -> str:
        own = f"{self.stage}{self.kind.value}" + (str(self.microbatch) if self.microbatch >= 0 else "")
        return "+".join([own, *map(str, self.also)])


Line = tuple[Action, ...]
Schedule = tuple[Line, ...]


def parse_action(text: str) -> Action:
    """``"0F3"``, ``"0UPDATE"`` or ``"0SEND_F3+0RECV_B1"`` as an action."""
    first, *others = (_parse_one(part, text) for part in text.split("+"))
    return replace(first, also=tuple(others)) if others else first


def _parse_one(part: str, text: str) -> Action:
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)?", part)
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


def owners(schedule: Schedule) -> dict[int, int]:
    """Which rank works on which stage; the first rank that names a stage has it."""
    found: dict[int, int] = {}
    for rank, line in enumerate(schedule):
        for action in line:
            for part in action.all:
                found.setdefault(part.stage, rank)
    return dict(sorted(found.items()))


def microbatches(actions: Iterable[Action]) -> int:
    """How many microbatches these actions speak of."""
    return 1 + max((part.microbatch for action in actions for part in action.all), default=-1)


def ends(message: Action) -> tuple[int, int]:
    """From which stage to which a message goes, said by either side."""
    s = message.stage
    return {
        Kind.SEND_F: (s, s + 1),
        Kind.RECV_F: (s - 1, s),
        Kind.SEND_B: (s, s - 1),
        Kind.RECV_B: (s + 1, s),
    }[message.kind]


def keep(schedule: Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    """The first stages and microbatches of a schedule; what was valid stays valid (see ``orders.py``)."""
    return tuple(
        tuple(a for a in line if a.stage < num_stages and a.microbatch < num_microbatches) for line in schedule
    )


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Refuses what no order can be written for."""
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: a pipeline has at least one")
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches: a step needs at least one")
