"""The work of a step on the ranks of the pipe axis: an order, completed for a row and checked.

    Pipeline("1f1b", pipe=4)                    4 stages, stage s on rank s
    Pipeline("interleaved", pipe=4, chunks=2)   8 stages, stage s on rank s mod 4
    Pipeline(None, pipe=1)                      no pipeline: one stage
    Pipeline(parse_schedule(text), pipe=4)      written by hand

A schedule of several stages is proved before it is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.schedule.actions import (
    ADDS_GRADIENTS,
    SENDS,
    Kind,
    Line,
    Schedule,
    awaits,
    carries,
    count_microbatches,
    count_stages,
    owners,
)
from plait.schedule.check import check
from plait.schedule.orders import chunked_orders, forwards, one_stage, stages_per_rank, write_order
from plait.schedule.passes import AHEAD, add_messages, add_sharding, check_hold, complete, join_backward
from plait.table.cells import Strategy
from plait.table.parallelism import Parallelism

Key = tuple[str, int, int]
"""A message: ``F`` or ``B``, the stage that needs it, and the microbatch."""


@dataclass(frozen=True)
class Pipeline:
    """An order of work on ``pipe`` ranks.

    ``order`` is a name, a schedule written by hand, or None: ``1f1b``, or one stage if there is one rank.

    Raises:
        ValueError: an unknown order, chunks for an order that takes none, a schedule for another number of ranks.
    """

    order: str | Schedule | None
    pipe: int
    chunks: int | None = None
    """The stages on each rank, for an order that takes chunks."""
    hold: int | None = 1
    """The number of stages that a rank keeps unsharded for its next passes; None gathers units one by one.  See
    ``add_sharding``."""

    def __post_init__(self) -> None:
        if self.name is not None:
            if " " in self.name or "\n" in self.name:
                raise ValueError("the schedule is text: read it by plait.schedule.actions.parse_schedule(text) first")
            stages_per_rank(self.name, self.chunks)
        elif self.chunks is not None:
            raise ValueError(f"{self.chunks} chunks: only {chunked_orders()} takes chunks")
        check_hold(self.hold)
        if isinstance(self.order, tuple):
            if () in self.order:
                rank = f"rank {self.order.index(())}"
                raise ValueError(f"the schedule gives {rank} no stage: each rank of the pipe axis has at least one")
            if len(self.order) != self.pipe:
                lines, fix = len(self.order), f"use pipe={len(self.order)}, or write {self.pipe} lines"
                text = f"the schedule has {lines} lines, one for each rank, but the mesh has pipe={self.pipe}: {fix}"
                raise ValueError(text)
            check(self.order)

    @classmethod
    def of(cls, parallelism: Parallelism, pipe: int) -> Pipeline:
        """Returns the pipeline of a layout, for a mesh with ``pipe`` ranks on its axis."""
        return cls(parallelism.schedule, pipe, parallelism.chunks, parallelism.hold)

    @property
    def name(self) -> str | None:
        """The order's name; None for one stage, or a schedule written by hand."""
        if self.order is None:
            return "1f1b" if self.pipe > 1 else None
        return self.order if isinstance(self.order, str) else None

    @property
    def plain(self) -> bool:
        """True without a pipeline: one stage, whose microbatches run forward and backward in turn."""
        return self.order is None and self.name is None

    @property
    def num_stages(self) -> int:
        if isinstance(self.order, tuple):
            return count_stages(self.order)
        return 1 if self.name is None else self.pipe * stages_per_rank(self.name, self.chunks)

    @property
    def owner(self) -> Mapping[int, int]:
        """The rank of each stage."""
        return owners(self.written(1))

    @property
    def splits_backward(self) -> bool:
        """True if some backwards come in two parts, once there are enough microbatches to fill the order."""
        return any(action.kind is Kind.WEIGHT for line in self.written(2 * self.pipe) for action in line)

    def written(self, num_microbatches: int) -> Schedule:
        """Returns the order without additions; one written by hand has its own length."""
        if isinstance(self.order, tuple):
            return self.order
        if self.name is None:
            return one_stage(num_microbatches)
        return write_order(self.name, self.num_stages, num_microbatches, self.chunks)

    def completed(self, num_microbatches: int, strategy: Strategy) -> Schedule:
        """Returns every rank's line, with the gathers and reductions of the row, and the messages.  Raises
        ValueError if an order written by hand is for another number of microbatches."""
        schedule = self.written(num_microbatches)
        own = count_microbatches(schedule)
        if own != num_microbatches:
            fix = f"give {own}, or write it for {num_microbatches}"
            text = f"the schedule is written for {own} microbatches, but the step brings {num_microbatches}: {fix}"
            raise ValueError(text)
        if self.plain:
            return schedule
        if self.name is not None:
            schedule = join_backward(schedule)
        schedule = complete(schedule, strategy, hold=self.hold)
        check(schedule, num_stages=self.num_stages, num_microbatches=num_microbatches)
        return schedule

    def evaluated(self, num_microbatches: int, strategy: Strategy) -> Schedule:
        """Returns every rank's line of an evaluation, proved: the order's forwards, with gathers and messages."""
        schedule = forwards(self.written(num_microbatches), num_microbatches)
        if self.num_stages > 1:
            schedule = add_messages(add_sharding(schedule, strategy, hold=self.hold), AHEAD)
        check(schedule, num_stages=self.num_stages, num_microbatches=num_microbatches, backward=False)
        return schedule


@dataclass(frozen=True)
class RankProgram:
    """A completed schedule, with the facts that one rank needs."""

    schedule: Schedule
    line: Line
    last: frozenset[tuple[Kind, int, int]]
    """The passes that compute the last gradient of their stage."""
    split: frozenset[tuple[int, int]]
    """The stages and microbatches of the rank whose backward comes in two parts."""
    acks: Mapping[Key, tuple[Key, ...]]
    """Maps a message that the rank receives to its own messages that have arrived by then."""

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankProgram:
        split = frozenset((a.stage, a.microbatch) for a in schedule[rank] if a.kind is Kind.INPUT)
        return cls(schedule, schedule[rank], last_gradients(schedule), split, acks(schedule, rank))


def last_gradients(schedule: Schedule) -> frozenset[tuple[Kind, int, int]]:
    """The pass of each stage that computes its last gradient, as (kind, stage, microbatch)."""
    adding = (action for line in schedule for action in line if action.kind in ADDS_GRADIENTS)
    return frozenset({a.stage: (a.kind, a.stage, a.microbatch) for a in adding}.values())


def acks(schedule: Schedule, rank: int) -> dict[Key, tuple[Key, ...]]:
    """Maps a message that a rank receives to its own messages that have certainly arrived by then.

        rank 0   ... SEND_F0  ...  F3 SEND_F3 ...         F3 was sent after B0 ran on rank 0, and B0 needed the gradient
        rank 1   ... B0 SEND_B0 ... fetch F3              that rank 1 sent: so SEND_B0 has arrived, its memory is free

    So a rank may free the memory of its messages without asking, and without waiting for it.
    """
    owner, num_stages = owners(schedule), count_stages(schedule)
    arrived: dict[Key, tuple[Key, ...]] = {}
    for other, line in enumerate(schedule):
        used: list[Key] = []
        for action in line if other != rank else ():
            if (needed := awaits(action, num_stages)) and owner.get(needed.stage) == rank:
                used.append((needed.way, needed.target, needed.microbatch))
            if action.kind in SENDS and owner[(sent := carries(action)).target] == rank:
                arrived[sent.way, sent.target, sent.microbatch] = tuple(used)
                used = []
    return arrived
