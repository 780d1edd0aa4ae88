"""Time: a schedule and the costs of its passes give a timeline; bubbles are a result, never part of a schedule.

    simulate(one_f_one_b(2, 2), Costs())      F = I = W = 1, so B = 2; one letter is one unit of time

    rank 0   F0 F1 .  .B0B0 .B1B1             work 6, waits 2 + 1 = 3
    rank 1      F0B0B0F1B1B1                  work 6, waits 0

A rank carries out its line in order.  A pass starts when the rank is free and its inputs have arrived.  A message
leaves when it has been sent *and* its receive is posted, waits until the one before it has left the link, and then
takes ``latency + bytes / bandwidth``.  Sending takes none of the rank's time.  A schedule without messages behaves as
if each were sent at once to a receive that was posted long ago.  Gathers and reductions of data parallelism take the
time of their line or, with ``overlap``, of a lane in parallel to it, in the order in which they are issued:

    line   0F0 0F1 .   2F0 ...         stage 2 is gathered while stage 0 computes; the pass that reads it waits,
    lane   2UNSHARD------              and an update waits until the lane is free

Each action is visited once, in an order that the dependencies allow; ``bubbles.py`` has closed forms.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import add

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
    walk,
)

PerStage = float | tuple[float, ...]

COLLECTIVES = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.REDUCE})
"""Kinds that travel between the ranks of one stage."""
COSTED = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.REDUCE, Kind.UPDATE)
"""Kinds with their own cost, in the field of ``Costs`` with their name."""


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit of time) and bytes of a stage; one number applies to every stage."""

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    """A full backward takes the time of its ``input`` and its ``weight`` part."""
    latency: float = 0.0
    message_bytes: float = 0.0
    """Bytes of one activation between two stages, or of its gradient."""
    bandwidth: float = inf
    """Bytes per unit of time from one rank to another; each pair of ranks and each direction has its own link."""
    activation_bytes: PerStage = 1.0
    """Bytes that one microbatch keeps on a stage from its forward until its B or W."""
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    reduce: PerStage = 0.0
    update: PerStage = 0.0
    overlap: bool = False
    """True if gathers and reductions travel during computation, on one lane of their rank."""

    def seconds(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """The times of each stage's actions, by kind; messages and reshards take none of their rank's time.  Raises
        ValueError for costs of another number of stages, or one that is negative or not finite."""
        if not (0 <= self.latency < inf and 0 <= self.message_bytes < inf and self.bandwidth > 0):
            raise ValueError(
                f"latency {self.latency}, message_bytes {self.message_bytes}, bandwidth {self.bandwidth}: "
                f"the first two are finite and at least 0, bandwidth is above 0"
            )
        seconds = {k: per_stage(k.name.lower(), getattr(self, k.name.lower()), num_stages) for k in COSTED}
        return seconds | {Kind.BACKWARD: tuple(map(add, seconds[Kind.INPUT], seconds[Kind.WEIGHT]))}


def per_stage(name: str, cost: PerStage, num_stages: int) -> tuple[float, ...]:
    """Returns a cost as one number per stage."""
    costs = cost if isinstance(cost, tuple) else (cost,) * num_stages
    if len(costs) != num_stages:
        raise ValueError(f"{name} has {len(costs)} numbers for {num_stages} stages: give one for each, or one for all")
    if wrong := [one for one in costs if not 0 <= one < inf]:
        raise ValueError(f"{name} is {wrong[0]} for one stage: no cost is below 0, and each is a finite number")
    return costs


@dataclass(frozen=True)
class Timeline:
    """The start and end of each action of a schedule."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the step to the last end."""
        return max((max(line) for line in self.ends if line), default=0.0)

    def line(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """Yields a rank's actions, each with its start and end."""
        return zip(self.schedule[rank], self.starts[rank], self.ends[rank], strict=True)

    def work(self, rank: int) -> float:
        """The time that a rank computes."""
        return sum(end - start for action, start, end in self.line(rank) if action.kind in PASSES)

    def waits(self, rank: int) -> float:
        """The idle time from the start of a rank's first pass to the end of its last: the cost of a bubble
        if the next step can begin on a rank while others still end this one."""
        passes = [(start, end) for action, start, end in self.line(rank) if action.kind in PASSES]
        return passes[-1][1] - passes[0][0] - self.work(rank) if passes else 0.0

    def idle_share(self, rank: int | None = None) -> float:
        """The share of the makespan in which a rank does not compute; for all ranks together if none is given."""
        ranks = range(len(self.schedule)) if rank is None else [rank]
        return 1 - sum(map(self.work, ranks)) / (len(ranks) * self.makespan) if self.makespan else 0.0

    def memory(self, rank: int, costs: Costs) -> tuple[tuple[float, float], ...]:
        """A rank's activation bytes as (time, bytes from then on), held from the start of F to the end of B or W."""
        size = per_stage("activation_bytes", costs.activation_bytes, count_stages(self.schedule))
        held, curve = 0.0, [(0.0, 0.0)]
        for action, start, end in self.line(rank):
            if more := activations(action):
                held += more * size[action.stage]
                curve.append((start if more > 0 else end, held))
        return tuple(curve)


# ---- the walk -----------------------------------------------------------------------------------------------


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Returns the timeline of a schedule; ValueError if it never ends (see ``check``), or costs do not fit it."""
    owner = owners(schedule)
    seconds = costs.seconds(1 + max(owner))

    def takes(action: Action) -> float:
        return seconds[action.kind][action.stage] if action.kind in seconds else 0.0

    timeline, stuck = play(schedule, owner, takes, costs)
    if stuck:
        raise ValueError(f"the schedule never ends: {stuck} waits forever; plait schedule check says why")
    return timeline


def play(
    schedule: Schedule, owner: dict[int, int], takes: Callable[[Action], float], costs: Costs
) -> tuple[Timeline, str]:
    """Returns a schedule's timeline, and the ranks that are stuck with their actions; empty if none is.

    Args:
        owner: the rank of each stage.
        takes: the time of an action; of the costs, only those of messages and ``overlap`` count.
    """
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    clock, lanes = [0.0] * len(schedule), [0.0] * len(schedule)  # when the line, and its lane, are free
    gathered: dict[int, float] = {}  # when each stage is whole
    num_stages = 1 + max(owner)
    messages = _Messages(costs, owner, any(a.kind in MESSAGES for line in schedule for a in line))

    def attempt(rank: int, action: Action) -> tuple[Value | None, Iterable[Value]]:
        kind, start = action.kind, clock[rank]
        if kind in READS_PARAMETERS:
            value = awaits(action, num_stages)
            arrival = 0.0 if value is None else messages.arrived.get(value)
            if arrival is None:
                return value, ()
            start = max(start, arrival, gathered.get(action.stage, 0.0))
        in_lane = costs.overlap and kind in COLLECTIVES
        if in_lane or kind is Kind.UPDATE:
            start = max(start, lanes[rank])
        end = start + takes(action)
        starts[rank].append(start)
        ends[rank].append(end)
        if not in_lane:
            clock[rank] = end
            return None, messages.after(action, end)
        lanes[rank] = end
        if kind is Kind.UNSHARD:
            gathered[action.stage] = end
        return None, ()

    stuck = walk(schedule, attempt)
    timeline = Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
    return timeline, ", ".join(f"rank {rank} at {schedule[rank][stuck[rank][0]]}" for rank in sorted(stuck))


class _Messages:
    """The times at which the results of passes arrive where they are needed."""

    def __init__(self, costs: Costs, owner: dict[int, int], written: bool) -> None:
        self.owner, self.written = owner, written
        self.arrived: dict[Value, float] = {}
        self.latency, self.occupied = costs.latency, costs.message_bytes / costs.bandwidth
        self.free: dict[tuple[int, int], float] = {}  # when the last message has left each link
        self.half: dict[Value, float] = {}  # when the first side of a message has started

    def after(self, action: Action, now: float) -> Iterable[Value]:
        """Sets the arrival times of the values that an action sends as it ends."""
        if (value := makes(action)) is not None:
            rank = self.owner[action.stage]
            if self.owner.get(value.target, rank) == rank:
                self.arrived[value] = now
                return (value,)
            return () if self.written else (self._transfer(value, now),)
        if action.kind not in MESSAGES:
            return ()
        value = carries(action)
        if value in self.half:
            return (self._transfer(value, max(now, self.half.pop(value))),)
        self.half[value] = now
        return ()

    def _transfer(self, value: Value, start: float) -> Value:
        if self.occupied:
            link = self.owner[value.stage], self.owner[value.target]
            start = max(start, self.free.get(link, 0.0))
            self.free[link] = start + self.occupied
        self.arrived[value] = start + self.occupied + self.latency
        return value
