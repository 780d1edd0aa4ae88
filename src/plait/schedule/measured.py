"""What a step's log says in the simulator's words: a timeline, and the costs that predict it.

    log                                  measured_timeline            measured_costs
    rank 1  |.....0.3 s.....|#0.2 s#|    1F0 from 0.3 to 0.5          forward of stage 1: the median of such 0.2 s

``simulate(schedule, measured_costs(logs))`` is then a prediction with nothing in it but the order and what its
actions cost; what it lacks of the measured time is for ``idle.py`` to name.  ``as_log`` goes the other way, so that a
simulated step can be read, attributed and drawn as if it had been measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from plait.schedule.actions import PASSES, Kind, Schedule, awaits, count_stages, format_schedule, owners
from plait.schedule.events import Event, Log, Span
from plait.schedule.simulate import COLLECTIVES, Costs, PerStage, Timeline


def schedule_of(log: Log) -> Schedule:
    """The actions that a log is of.

    Raises:
        ValueError: a log without any action.
    """
    schedule = tuple(tuple(event.action for event in line) for line in log)
    if not any(schedule):
        raise ValueError(f"the log of {len(log)} ranks holds no event: record a whole step")
    return schedule


def measured_timeline(log: Log) -> Timeline:
    """When each action of a log started and ended, in seconds from the start of the step.

    A pass starts when all its waiting is over: it is as long as what it computed, and ends where it ended.  (A wait in
    the midst of a pass is moved in front of it; ``report/timeline.py`` draws waits where they were.)  So ``work`` is
    the time in which a rank computed, and ``idle_share`` the share of the step in which it did not.
    """
    return Timeline(
        schedule_of(log),
        tuple(tuple(e.end - e.busy if e.action.kind in PASSES else e.start for e in line) for line in log),
        tuple(tuple(e.end for e in line) for line in log),
    )


def busy_shares(log: Log) -> tuple[float, ...]:
    """The share of the step in which each rank computed; the rest of it, over all ranks, is ``idle_share``."""
    timeline = measured_timeline(log)
    return tuple(1 - timeline.idle_share(rank) for rank in range(len(log)))


def measured_costs(
    logs: Sequence[Log],
    *,
    latency: float = 0.0,
    message_bytes: float = 0.0,
    bandwidth: float = float("inf"),
    activation_bytes: PerStage = 1.0,
    overlap: bool = False,
) -> Costs:
    """What the actions of each stage cost in these steps: medians over microbatches and steps, in seconds.

    Passes and updates count without their waits.  Gathers and reductions count whole: what they wait for are the
    partners of their stage in other pipelines, and those are the cost.  To them comes what passes waited for
    collectives (see ``collectives_inside``).  A stage with full backwards only has half of one as its input part and
    half as its weight part, which changes nothing as long as they stay together.  Where it has parts, those are its
    costs, and a full backward is taken to be their sum.

    Args:
        logs: steps of one schedule; leave out the first ones, in which caches fill.
        latency, message_bytes, bandwidth, activation_bytes, overlap: as in ``Costs``; a log does not say them.

    Raises:
        ValueError: no log, logs of different schedules, or a stage without a forward or a backward.
    """
    if not logs:
        raise ValueError("no log to measure costs in: record at least one step")
    schedule = schedule_of(logs[0])
    for index, log in enumerate(logs):
        if schedule_of(log) != schedule:
            raise ValueError(
                f"logs 0 and {index} are of different schedules: give logs of one. They are\n"
                f"{format_schedule(schedule)}\n\n{format_schedule(schedule_of(log))}"
            )
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for log in logs:
        for line in log:
            for event in line:
                whole = event.action.kind in COLLECTIVES
                seconds = event.end - event.start if whole else event.busy
                found[event.action.kind, event.action.stage].append(seconds)
    medians = {key: median(seconds) for key, seconds in found.items()}
    inside = [collectives_inside(log) for log in logs]
    for key in {key for step in inside for key in step}:
        medians[key] += median(step.get(key, 0.0) for step in inside)
    stages = range(count_stages(schedule))

    def once(kind: Kind) -> tuple[float, ...]:
        return tuple(medians.get((kind, stage), 0.0) for stage in stages)

    forward, input_, weight = passes_per_stage(medians, len(stages))
    return Costs(
        forward=forward,
        input=input_,
        weight=weight,
        latency=latency,
        message_bytes=message_bytes,
        bandwidth=bandwidth,
        activation_bytes=activation_bytes,
        unshard=once(Kind.UNSHARD),
        reduce_grad=once(Kind.REDUCE_GRAD),
        reduce=once(Kind.REDUCE),
        update=once(Kind.UPDATE),
        overlap=overlap,
    )


def collectives_inside(log: Log) -> dict[tuple[Kind, int], float]:
    """Seconds that passes of a step waited for collectives, by the (kind, stage) of the action that answers for them.

    A stage's units are gathered and reduced while its passes run, so these seconds stand in the passes, while their
    actions may take no time at all.  What a forward or an input part waited belongs to the stage's UNSHARD, what a
    backward or a weight part waited to its REDUCE_GRAD, or to its REDUCE where it has none; each action of that kind
    bears the same part.  A pass that needs a message waits for that first.
    """
    schedule = schedule_of(log)
    owner, num_stages = owners(schedule), count_stages(schedule)
    times = Counter((a.kind, a.stage) for line in schedule for a in line)
    found: dict[tuple[Kind, int], float] = defaultdict(float)
    for rank, line in enumerate(log):
        for event in line:
            kind, stage = event.action.kind, event.action.stage
            if kind not in PASSES:
                continue
            message = awaits(event.action, num_stages)
            here = message is None or owner.get(message.stage, rank) == rank
            spans = event.waits if here else event.waits[1:]
            first = Kind.UNSHARD if kind in (Kind.FORWARD, Kind.INPUT) else Kind.REDUCE_GRAD
            key = next((k for k in ((first, stage), (Kind.REDUCE, stage)) if times[k]), None)
            if key is not None and spans:
                found[key] += sum(span.end - span.start for span in spans) / times[key]
    return dict(found)


def passes_per_stage(
    seconds: dict[tuple[Kind, int], float], num_stages: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Forward, input part and weight part of each stage, from the seconds of a pass by (kind, stage).

    Raises:
        ValueError: a stage without a forward, or without a backward and its two parts.
    """
    columns = []
    for stage in range(num_stages):
        forward, backward, input_, weight = (
            seconds.get((kind, stage)) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
        )
        if backward is not None and (input_ is None or weight is None):
            input_ = weight = backward / 2
        if forward is None or input_ is None or weight is None:
            raise ValueError(f"the log has no {'forward' if forward is None else 'backward'} of stage {stage}")
        columns.append((forward, input_, weight))
    forwards, inputs, weights = zip(*columns, strict=True)
    return forwards, inputs, weights


def as_log(timeline: Timeline) -> Log:
    """A simulated step as the log that its ranks would have written.

    A rank takes up an action when it is done with the one before, and waits in it until it starts.  What travels
    beside the line (``Costs.overlap``) takes no more of the line than what it holds up.
    """
    log = []
    for line, starts, ends in zip(timeline.schedule, timeline.starts, timeline.ends, strict=True):
        limits, limit = [], float("inf")  # the start of what comes after
        for start in reversed(starts):
            limits.append(limit)
            limit = min(limit, start)
        events, now = [], 0.0
        for action, start, end, latest in zip(line, starts, ends, reversed(limits), strict=True):
            stop = min(end, latest)
            begin = min(start, stop)
            waits = (Span(now, begin, f"what {action} needs"),) if begin > now else ()
            events.append(Event(action, now, stop, waits))
            now = stop
        log.append(tuple(events))
    return tuple(log)
