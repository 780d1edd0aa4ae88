"""The actions of a rank, as data.

An ``Action`` is one thing a rank does for one stage (and one microbatch); a ``Schedule`` is one tuple of actions per
rank.  The times of actions are left to the simulator.  The text form is exact, so a schedule can be written by hand,
printed and compared:

    0F0 0B0 0F1 0B1 0REDUCE 0UPDATE

reads: stage 0, forward and backward of microbatches 0 and 1, reduce the gradients, update the parameters.  Two stages:

    0F0 0SEND_F0 0RECV_B0 0B0              rank 0   SEND_F0 ──►  what stage 1 receives as RECV_F0
    1RECV_F0 1F0 1B0 1SEND_B0              rank 1   RECV_B0 ◄──  what stage 1 sends as SEND_B0

A full backward (B) may be split into an input part (I: the gradient of the stage's input, for which the stage before
waits) and a weight part (W: the gradients of its weights).  This is what passes need and make:

    pass   needs                                            makes                       activations of its stage
    F      the activation of the stage before               an activation               one more
    B      its own, and the gradient of the stage after     its input's gradient        one less
    I      the same                                         its input's gradient
    W      the gradient that I made                                                     one less

Messages are *started* by their action and never waited for: a receive is posted, and the pass that needs it waits.
Between two ranks each direction has its own channel, first in, first out.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar


class Kind(Enum):
    """The kinds of actions; the value is the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    REDUCE = "REDUCE"
    """Once per step: from the gradients' cell to the optimizer's."""
    UPDATE = "UPDATE"
    INPUT = "I"
    WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    """Once per microbatch: from a full gradient, unreduced over all data axes, to the gradients' cell."""

    __hash__ = object.__hash__  # members are looked up very often


PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
"""Kinds that compute."""
READS_PARAMETERS = PASSES - {Kind.WEIGHT}
"""Passes that read the stage's parameters; a weight part only multiplies activations and gradients."""
ADDS_GRADIENTS = frozenset({Kind.BACKWARD, Kind.WEIGHT})
"""Passes that make gradients of the stage's parameters."""
MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
"""Kinds that move an activation (F) to the next stage or its gradient (B) to the stage before."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
ACTIVATION, GRADIENT, TIED = "activation", "gradient", "tied"
"""The ledger's phases of messages between stages."""
_NEEDS_MICROBATCH = PASSES | MESSAGES | {Kind.REDUCE_GRAD}


MOST_STAGES, MOST_PASSES = 1 << 10, 1 << 16
"""The limits of a schedule that is written and proved; passes are its forwards."""


@dataclass(frozen=True)
class Action:
    """One action; ``microbatch`` is -1 for an action that happens once per step."""

    kind: Kind
    stage: int
    microbatch: int = -1

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < -1:
            raise ValueError(f"{self.kind.name} of stage {self.stage}, microbatch {self.microbatch}: count from 0")
        if (self.microbatch >= 0) != (self.kind in _NEEDS_MICROBATCH):
            raise ValueError(f"action {self.kind.name} of stage {self.stage} with microbatch {self.microbatch}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}" + (str(self.microbatch) if self.microbatch >= 0 else "")


Line = tuple[Action, ...]
Schedule = tuple[Line, ...]


def parse_action(text: str) -> Action:
    """Parses an action: ``"0F3"``, ``"0UPDATE"`` or ``"0SEND_F3"``."""
    known = {kind.value: kind for kind in Kind}
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)?", text)
    if match is None or match[2] not in known:
        raise ValueError(
            f"cannot read the action {text!r}: write stage, kind ({', '.join(known)}) and microbatch, as in 0F3"
        )
    return Action(known[match[2]], int(match[1]), int(match[3]) if match[3] else -1)


def format_schedule(schedule: Schedule) -> str:
    """Formats a schedule: one line per rank, actions separated by spaces; ``-`` for a rank that does nothing."""
    return "\n".join(" ".join(map(str, line)) or "-" for line in schedule)


def parse_schedule(text: str) -> Schedule:
    """Reads the text of ``format_schedule``."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return tuple(() if words == ["-"] else tuple(map(parse_action, words)) for words in lines)


# ---- what happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A wait for others within an action."""

    start: float
    end: float
    what: str
    """The thing waited for, as an error would name it."""


@dataclass(frozen=True)
class Event:
    """One action as it was carried out, in seconds since all ranks agreed on the counts of the step."""

    action: Action
    start: float
    end: float
    waits: tuple[Span, ...] = ()
    """Waits of a message or a collective: in order, not overlapping, within the event."""

    @property
    def busy(self) -> float:
        """Seconds of the action in which the rank did not wait for others."""
        return self.end - self.start - sum(span.end - span.start for span in self.waits)


Log = tuple[tuple[Event, ...], ...]
"""One step on all ranks of a pipeline, by rank: an event for each action, in order."""


# ---- what passes make and need ------------------------------------------------------------------------------


class Value(NamedTuple):
    """The result of a pass that others need; a message carries it between two ranks."""

    way: str
    """``F``: a stage's activation, for the next one.  ``B``: the gradient of its input, for the one before."""
    stage: int
    """The stage that makes it."""
    microbatch: int

    @property
    def target(self) -> int:
        """The neighbouring stage that needs the value; there is none beyond the ends of the pipeline."""
        return self.stage + 1 if self.way == "F" else self.stage - 1

    @property
    def send(self) -> Action:
        return Action(_SENT[self.way], self.stage, self.microbatch)

    @property
    def receive(self) -> Action:
        return Action(_RECEIVED[self.way], self.target, self.microbatch)


_SENT, _RECEIVED = {"F": Kind.SEND_F, "B": Kind.SEND_B}, {"F": Kind.RECV_F, "B": Kind.RECV_B}
_CARRIED = {Kind.SEND_F: ("F", 0), Kind.RECV_F: ("F", -1), Kind.SEND_B: ("B", 0), Kind.RECV_B: ("B", 1)}
_MADE = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "B"}
_NEEDED = {Kind.BACKWARD: "F", Kind.INPUT: "F", Kind.WEIGHT: "B"}
_ACTIVATIONS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}
_IN_FLIGHT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1}


def makes(action: Action) -> Value | None:
    """Returns the result of a pass that others need."""
    way = _MADE.get(action.kind)
    return None if way is None else Value(way, action.stage, action.microbatch)


def awaits(action: Action, num_stages: int) -> Value | None:
    """The value that a pass needs from a neighbouring stage: the first needs no activation, the last no gradient."""
    way = _MADE.get(action.kind)
    source = action.stage + (-1 if way == "F" else 1)
    return Value(way, source, action.microbatch) if way is not None and 0 <= source < num_stages else None


def needs(action: Action, num_stages: int) -> tuple[Value, ...]:
    """Returns everything that a pass needs: its own stage's value, then a neighbour's."""
    way = _NEEDED.get(action.kind)
    own = None if way is None else Value(way, action.stage, action.microbatch)
    return tuple(value for value in (own, awaits(action, num_stages)) if value is not None)


def carries(message: Action) -> Value:
    """Returns the value that a message moves, from either side's action."""
    way, source = _CARRIED[message.kind]
    return Value(way, message.stage + source, message.microbatch)


def ends(message: Action) -> tuple[int, int]:
    """Returns the stages from and to which a message goes, from either side's action."""
    value = carries(message)
    return value.stage, value.target


def activations(action: Action) -> int:
    """Returns the change in the number of activations of the rank: one from F until B or W."""
    return _ACTIVATIONS.get(action.kind, 0)


def in_flight(action: Action) -> int:
    """Returns the change in the number of microbatches between forward and backward: from F until B or I."""
    return _IN_FLIGHT.get(action.kind, 0)


# ---- whole schedules ----------------------------------------------------------------------------------------


def placed(schedule: Schedule) -> Iterator[tuple[Action, tuple[int, int]]]:
    """Yields a schedule's actions, line by line, each with its place: the rank and the index in its line."""
    for rank, line in enumerate(schedule):
        for index, action in enumerate(line):
            yield action, (rank, index)


def owners(schedule: Schedule) -> dict[int, int]:
    """Maps each stage to the rank that works on it: the first rank that names it."""
    owner: dict[int, int] = {}
    for action, (rank, _) in placed(schedule):
        owner.setdefault(action.stage, rank)
    return dict(sorted(owner.items()))


def count_stages(schedule: Schedule) -> int:
    return 1 + max((action.stage for action, _ in placed(schedule)), default=-1)


def count_microbatches(schedule: Schedule) -> int:
    return 1 + max((action.microbatch for action, _ in placed(schedule)), default=-1)


def keep(schedule: Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the first stages and microbatches of a schedule; a valid schedule stays valid (see ``orders.py``)."""
    return tuple(
        tuple(a for a in line if a.stage < num_stages and a.microbatch < num_microbatches) for line in schedule
    )


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Refuses sizes for which no order can be written."""
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: a pipeline has at least one")
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches: a step needs at least one")


def check_written(num_stages: int, num_microbatches: int) -> None:
    """Refuses sizes for which a schedule would take minutes to write and to prove."""
    if num_stages > MOST_STAGES or num_stages * num_microbatches > MOST_PASSES:
        raise ValueError(
            f"{num_stages:,} stages x {num_microbatches:,} microbatches: give at most {MOST_STAGES:,} stages, and a "
            f"product of at most {MOST_PASSES:,}"
        )


Thing = TypeVar("Thing", bound=Hashable)
"""A thing that actions wait for."""


def walk(
    schedule: Schedule, attempt: Callable[[int, Action], tuple[Thing | None, Iterable[Thing]]]
) -> dict[int, tuple[int, Thing]]:
    """Carries out a schedule: every rank in the order of its line, no action before the things that it needs.

    Any such order gives the same result.  The proof asks which ranks are left waiting, the simulator when actions
    start.

    Args:
        attempt: names the thing that an action still lacks, or carries it out and names the things that are now there.

    Returns:
        Each rank that is left waiting -> (index in its line, the thing it waits for); empty if the schedule is right.
    """
    at = [0] * len(schedule)
    waiting: dict[Thing, list[int]] = defaultdict(list)
    ready = deque(range(len(schedule)))
    while ready:
        rank = ready.popleft()
        while at[rank] < len(schedule[rank]):
            lacks, there = attempt(rank, schedule[rank][at[rank]])
            if lacks is not None:
                waiting[lacks].append(rank)
                break
            for thing in there:
                ready.extend(waiting.pop(thing, ()))
            at[rank] += 1
    return {rank: (at[rank], thing) for thing, ranks in waiting.items() for rank in ranks}
