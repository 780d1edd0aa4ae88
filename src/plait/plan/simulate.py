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

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from math import inf

from plait.core.actions import PASSES, Action, Kind, Schedule, ends, microbatches, owners

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
        num_stages = 1 + max(owners(self.schedule))
        size = per_stage("activation_bytes", costs.activation_bytes, num_stages)
        held, curve = 0.0, [(0.0, 0.0)]
        for action, start, end in zip(self.schedule[rank], self.starts[rank], self.ends[rank], strict=True):
            if action.kind is Kind.FORWARD:
                held += size[action.stage]
                curve.append((start, held))
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                held -= size[action.stage]
                curve.append((end, held))
        return tuple(curve)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule that ``check`` has passed.

    Raises:
        ValueError: costs that do not fit the schedule, or a schedule that never ends.
    """
    owner = owners(schedule)
    num_stages, num_microbatches = 1 + max(owner), microbatches(a for line in schedule for a in line)
    seconds = costs.seconds(num_stages)
    links = _Links(costs, owner, num_stages, num_microbatches)
    with_messages = any(a.kind in (Kind.SEND_F, Kind.SEND_B) for line in schedule for a in line)
    forward, backward, input_ = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT
    starts: list[list[float]] = [[] for _ in schedule]
    stops: list[list[float]] = [[] for _ in schedule]
    clock = [0.0] * len(schedule)
    lanes = [0.0] * len(schedule)  # when what was issued beside the line has ended
    gathered: list[dict[int, float]] = [{} for _ in schedule]  # when each stage is whole
    waiting: dict[int, int] = {}  # what has not arrived -> the rank that waits for it
    ready = deque(range(len(schedule)))
    M = num_microbatches
    while ready:
        rank = ready.popleft()
        line, begun, ended, now = schedule[rank], starts[rank], stops[rank], clock[rank]
        while len(begun) < len(line):
            action = line[len(begun)]
            kind, stage = action.kind, action.stage
            if kind is forward:
                needed = stage * M + action.microbatch
            elif kind is backward or kind is input_:
                needed = (num_stages + stage) * M + action.microbatch
            else:
                needed = -1
            if needed >= 0:
                arrival = links.arrived[needed]
                if arrival is None:
                    waiting[needed] = rank
                    break
                now = max(now, arrival, gathered[rank].get(stage, 0.0))
            elif kind is Kind.UPDATE:
                now = max(now, lanes[rank])
            duration = seconds.get(kind)
            if costs.overlap and duration is not None and kind in COLLECTIVES:
                begun.append(max(now, lanes[rank]))
                lanes[rank] = begun[-1] + duration[stage]
                ended.append(lanes[rank])
                if kind is Kind.UNSHARD:
                    gathered[rank][stage] = lanes[rank]
                continue
            begun.append(now)
            if duration is not None:
                now += duration[stage]
            ended.append(now)
            if needed < 0:
                fresh = links.message(action, now) if duration is None else []
            elif kind is forward:
                fresh = links.made(stage, stage + 1, action.microbatch, now, with_messages)
            else:
                fresh = links.made(stage, stage - 1, action.microbatch, now, with_messages)
            for key in fresh:
                if key in waiting:
                    ready.append(waiting.pop(key))
        clock[rank] = now
    if waiting:
        stuck = {rank: schedule[rank][len(starts[rank])] for rank in waiting.values()}
        who = ", ".join(f"rank {r} at {a}" for r, a in sorted(stuck.items()))
        raise ValueError(f"the schedule never ends: {who} waits for ever; plait schedule check says why")
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, stops)))


class _Links:
    """What has arrived where, and when.  Key ``stage * M + m``: input of a forward; ``(S + stage) * M + m``: gradient
    of its output.  The first stage has its inputs from the start, and the last stage its gradients.
    """

    def __init__(self, costs: Costs, owner: dict[int, int], num_stages: int, num_microbatches: int) -> None:
        self.owner, self.S, self.M = owner, num_stages, num_microbatches
        self.arrived: list[float | None] = [None] * (2 * num_stages * num_microbatches)
        self.arrived[:num_microbatches] = [0.0] * num_microbatches
        self.arrived[-num_microbatches:] = [0.0] * num_microbatches
        self.latency, self.occupied = costs.latency, costs.message_bytes / costs.bandwidth
        self.free: dict[tuple[int, int], float] = {}
        self.half: dict[int, float] = {}  # messages of which one side has started

    def made(self, stage: int, target: int, microbatch: int, now: float, with_messages: bool) -> list[int]:
        """A stage has made what another needs; without explicit messages it goes off at once."""
        if not 0 <= target < self.S:
            return []
        key = (target if target > stage else self.S + target) * self.M + microbatch
        a, b = self.owner[stage], self.owner[target]
        if a == b:
            self.arrived[key] = now
        elif with_messages:
            return []
        else:
            self.arrived[key] = self._transfer(a, b, now)
        return [key]

    def message(self, action: Action, now: float) -> list[int]:
        """One side of a message, or of several, has started; what is on its way now gets its time of arrival."""
        fresh = []
        for part in action.parts if action.kind is not Kind.RESHARD else ():
            source, target = ends(part)
            key = (target if target > source else self.S + target) * self.M + part.microbatch
            if key not in self.half:
                self.half[key] = now
                continue
            start = max(now, self.half.pop(key))
            self.arrived[key] = self._transfer(self.owner[source], self.owner[target], start)
            fresh.append(key)
        return fresh

    def _transfer(self, source: int, target: int, start: float) -> float:
        if self.occupied:
            start = max(start, self.free.get((source, target), 0.0))
            self.free[source, target] = start + self.occupied
        return start + self.occupied + self.latency
