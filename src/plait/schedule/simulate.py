"""Time: a schedule and what its passes cost give a timeline; bubbles are an output, never a part of a schedule.

    simulate(one_f_one_b(2, 2), Costs())      F = I = W = 1, so B = 2; one letter is one unit of time

    rank 0   F0 F1 .  .B0B0 .B1B1             work 6, waits 2 + 1 = 3
    rank 1      F0B0B0F1B1B1                  work 6, waits 0

A rank carries out its line in order.  A pass starts when the rank is free and what it needs has arrived; a message
leaves when it has been sent *and* its receive is posted, waits until the one before it has left the link, and then
takes ``latency + bytes / bandwidth``.  Sending takes no time of the rank.  A schedule without messages behaves as if
each were sent at once to a receive that was posted long ago.  Gathers and reductions of data parallelism take the
time of their line; or, with ``overlap``, that of a lane beside it, one after the other as they are issued:

    line   0F0 0F1 .   2F0 ...         stage 2 is gathered while stage 0 computes; the pass that reads it waits,
    lane   2UNSHARD------              and an update waits until the lane is free

A line's actions are visited once, in an order that the dependencies allow, so the time to simulate is linear in
their number.  Where that is too long there are the closed forms of ``bubbles.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf

from plait.schedule.actions import (
    MESSAGES,
    PASSES,
    READS_PARAMETERS,
    Action,
    Kind,
    Schedule,
    Value,
    activations,
    awaits,
    carries,
    count_stages,
    makes,
    owners,
)
from plait.schedule.walk import walk

PerStage = float | tuple[float, ...]

COLLECTIVES = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.REDUCE})
"""What travels between the ranks of one stage."""


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit of time) and bytes of a stage; one number stands for every stage."""

    forward: PerStage = 1.0
    input: PerStage = 1.0
    """The input part of a backward; a full backward takes this and ``weight``."""
    weight: PerStage = 1.0
    latency: float = 0.0
    message_bytes: float = 0.0
    """Of one activation between two stages, or its gradient."""
    bandwidth: float = inf
    """Bytes per unit of time from one rank to another; each pair of ranks and each direction has its own link."""
    activation_bytes: PerStage = 1.0
    """What one microbatch keeps on a stage from its forward until its B or W."""
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    reduce: PerStage = 0.0
    update: PerStage = 0.0
    overlap: bool = False
    """Whether gathers and reductions travel beside the computation, on one lane of their rank."""

    def seconds(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """How long the actions of each stage take, by kind; messages and reshards take none of their rank's time.

        Raises:
            ValueError: a cost per stage, but of another number of stages; or one that is negative or no finite number.
        """
        forward, input_, weight, unshard, reduce_grad, reduce, update = (
            per_stage(name, getattr(self, name), num_stages)
            for name in ("forward", "input", "weight", "unshard", "reduce_grad", "reduce", "update")
        )
        if not (0 <= self.latency < inf and 0 <= self.message_bytes < inf and self.bandwidth > 0):
            raise ValueError(
                f"latency {self.latency}, message_bytes {self.message_bytes}, bandwidth {self.bandwidth}: "
                f"the first two are finite and at least 0, bandwidth is above 0"
            )
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: tuple(i + w for i, w in zip(input_, weight, strict=True)),
            Kind.INPUT: input_,
            Kind.WEIGHT: weight,
            Kind.UNSHARD: unshard,
            Kind.REDUCE_GRAD: reduce_grad,
            Kind.REDUCE: reduce,
            Kind.UPDATE: update,
        }


def per_stage(name: str, cost: PerStage, num_stages: int) -> tuple[float, ...]:
    """A cost as one number per stage."""
    found = cost if isinstance(cost, tuple) else (cost,) * num_stages
    if len(found) != num_stages:
        raise ValueError(f"{name} has {len(found)} numbers for {num_stages} stages: give one for each, or one for all")
    if wrong := [one for one in found if not 0 <= one < inf]:
        raise ValueError(f"{name} is {wrong[0]} for one stage: no cost is below 0, and each is a finite number")
    return found


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule starts and ends."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the start of the step to the last end."""
        return max((max(line) for line in self.ends if line), default=0.0)

    def work(self, rank: int) -> float:
        """How long a rank computes."""
        line = zip(self.schedule[rank], self.starts[rank], self.ends[rank], strict=True)
        return sum(end - start for action, start, end in line if action.kind in PASSES)

    def waits(self, rank: int) -> float:
        """How long a rank does not compute between the start of its first pass and the end of its last.

        This is what a bubble costs when the next step can begin on a rank while others still end this one.
        """
        passes = [i for i, action in enumerate(self.schedule[rank]) if action.kind in PASSES]
        if not passes:
            return 0.0
        return self.ends[rank][passes[-1]] - self.starts[rank][passes[0]] - self.work(rank)

    def idle_share(self, rank: int | None = None) -> float:
        """The share of the makespan in which a rank does not compute; of all ranks together if none is given."""
        if not self.makespan:
            return 0.0
        ranks = range(len(self.schedule)) if rank is None else [rank]
        return 1 - sum(map(self.work, ranks)) / (len(ranks) * self.makespan)

    def memory(self, rank: int, costs: Costs) -> tuple[tuple[float, float], ...]:
        """A rank's activation bytes as (time, bytes from then on); held from the start of F to the end of B or W."""
        size = per_stage("activation_bytes", costs.activation_bytes, count_stages(self.schedule))
        held, curve = 0.0, [(0.0, 0.0)]
        for action, start, end in zip(self.schedule[rank], self.starts[rank], self.ends[rank], strict=True):
            if more := activations(action):
                held += more * size[action.stage]
                curve.append((start if more > 0 else end, held))
        return tuple(curve)


# ---- the walk -----------------------------------------------------------------------------------------------


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule that ``check`` has passed.

    Raises:
        ValueError: costs that do not fit the schedule, or a schedule that never ends.
    """
    owner = owners(schedule)
    seconds = costs.seconds(1 + max(owner))

    def takes(action: Action) -> float:
        of_stages = seconds.get(action.kind)
        return 0.0 if of_stages is None else of_stages[action.stage]

    timeline, stuck = play(schedule, owner, takes, costs)
    if stuck:
        who = ", ".join(f"rank {r} at {a}" for r, a in sorted(stuck.items()))
        raise ValueError(f"the schedule never ends: {who} waits forever; plait schedule check says why")
    return timeline


def play(
    schedule: Schedule, owner: dict[int, int], takes: Callable[[Action], float], costs: Costs
) -> tuple[Timeline, dict[int, Action]]:
    """A schedule's timeline, and the action at which each stuck rank waits.

    Args:
        owner: the rank of each stage there is.
        takes: how long an action takes; of the costs, only those of messages and ``overlap`` count.
    """
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    clock = [0.0] * len(schedule)
    lanes = [0.0] * len(schedule)  # when what was issued beside the line has ended
    arrivals = [0.0] * len(schedule)  # of what each rank's next action needs
    gathered: dict[int, float] = {}  # when each stage is whole
    num_stages = 1 + max(owner)
    messages = _Messages(costs, owner, any(a.kind in MESSAGES for line in schedule for a in line))

    def lacks(rank: int, action: Action) -> Value | None:
        value = awaits(action, num_stages)
        arrival = 0.0 if value is None else messages.arrived.get(value)
        if arrival is None:
            return value
        arrivals[rank] = arrival
        return None

    def does(rank: int, action: Action) -> Iterable[Value]:
        kind, now, seconds = action.kind, clock[rank], takes(action)
        if costs.overlap and kind in COLLECTIVES:
            starts[rank].append(max(now, lanes[rank]))
            lanes[rank] = starts[rank][-1] + seconds
            ends[rank].append(lanes[rank])
            if kind is Kind.UNSHARD:
                gathered[action.stage] = lanes[rank]
            return ()
        if kind in READS_PARAMETERS:
            now = max(now, arrivals[rank], gathered.get(action.stage, 0.0) if gathered else 0.0)
        elif kind is Kind.UPDATE:
            now = max(now, lanes[rank])
        starts[rank].append(now)
        clock[rank] = now + seconds
        ends[rank].append(clock[rank])
        return messages.after(action, clock[rank])

    stuck = walk(schedule, lacks, does)
    timeline = Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
    return timeline, {rank: schedule[rank][index] for rank, (index, _) in stuck.items()}


class _Messages:
    """When what passes make has arrived where it is needed."""

    def __init__(self, costs: Costs, owner: dict[int, int], written: bool) -> None:
        self.owner, self.written = owner, written
        self.arrived: dict[Value, float] = {}
        self.latency, self.occupied = costs.latency, costs.message_bytes / costs.bandwidth
        self.free: dict[tuple[int, int], float] = {}
        """When the last message has left each link."""
        self.half: dict[Value, float] = {}
        """Messages of which one side has started."""

    def after(self, action: Action, now: float) -> list[Value]:
        """What an action that ends now puts on its way: it gets its time of arrival."""
        value = makes(action)
        if value is not None:
            rank = self.owner[action.stage]
            target = self.owner.get(value.target, rank)
            if target == rank:
                self.arrived[value] = now
            elif self.written:
                return []
            else:
                self._transfer(value, rank, target, now)
            return [value]
        sent = []
        for message in action.parts if action.kind in MESSAGES else ():
            value = carries(message)
            if value not in self.half:
                self.half[value] = now
                continue
            self._transfer(value, self.owner[value.stage], self.owner[value.target], max(now, self.half.pop(value)))
            sent.append(value)
        return sent

    def _transfer(self, value: Value, source: int, target: int, start: float) -> None:
        if self.occupied:
            start = max(start, self.free.get((source, target), 0.0))
            self.free[source, target] = start + self.occupied
        self.arrived[value] = start + self.occupied + self.latency
