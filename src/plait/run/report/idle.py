"""The causes of the time in which a rank does not compute: each moment has one, and they add up.

A rank that does not compute does something else, or waits for another rank, which at that moment computes, does
something else, or waits for a third.  This chain ends at a rank that waits for no other, and what
that rank does is the cause for all of them:

    rank 0   |0F0 ####|0SEND_F0|python|...          rank 2 waits for 1F0.  It waits for rank 0's computing, then for
    rank 1   |1F0 ....................|####|        its sending, then for rank 0's message, which is on its way, then
    rank 2   |2F0 .............................     for rank 1's computing.

Waiting *for passes of others* has three causes.  Two imagined steps, with the same passes and nothing else that takes
time, tell them apart in each part of a rank's line (before its first pass, from there to its last, after its last):

    all equal       every pass takes the mean of its kind      what a rank waits is the order's own
    as measured     every pass takes as long as it did         what it waits beyond that is imbalance
    what happened   messages, collectives, Python as well      what it waits beyond that is knock-on: passes came late

No part is below zero.  A pass waits for its neighbouring stage until that stage's pass has ended; after that, its
message is on the way.  The first update waits for the last rank to reach its updates (the global norm).  At the end of
its line a rank waits for the rank that ends the step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean

from plait.run.report.measured import measured_timeline, schedule_of
from plait.schedule.actions import MESSAGES, PASSES, Event, Kind, Log, awaits, makes, owners
from plait.schedule.simulate import COLLECTIVES, Costs, Timeline, play


@dataclass(frozen=True)
class Idle:
    """One rank's seconds of a step, by cause.

    The order itself requires the waits ``warm_up`` before the rank's first pass, ``bubble`` between its first and last,
    and ``cool_down`` after its last.  ``communication`` (messages and collectives), ``update`` and ``other`` (say,
    Python between two actions) are this rank's, or those of a rank that it waits for.
    """

    busy: float
    warm_up: float
    bubble: float
    cool_down: float
    imbalance: float
    knock_on: float
    communication: float
    update: float
    other: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the name of the field."""
        return asdict(self)

    @property
    def idle(self) -> float:
        """Seconds in which the rank did not compute."""
        return self.seconds - self.busy

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def shares(self) -> dict[str, float]:
        """Each part divided by the whole step."""
        return {name: part / (self.seconds or 1.0) for name, part in self.parts.items()}


ORDERS_OWN = ("warm_up", "bubble", "cool_down")
"""The waiting that the order itself requires, in the three parts of a rank's line."""

_Piece = tuple[float, float, str | int]
"""Start, end, and the part of ``Idle`` to which a piece counts, or the number of the rank that it waits for."""


def idle_times(log: Log) -> tuple[Idle, ...]:
    """The seconds of each rank's step by cause.  The waiting of a rank without passes is cool-down.  Raises ValueError
    if the log is not of a whole step."""
    timeline = measured_timeline(log)
    lines = _pieces(log, timeline.makespan)
    even, measured = map(_waits_of_passes, (even_passes(timeline), measured_passes(timeline)))
    ranks = []
    for rank, line in enumerate(lines):
        ends = [event.end for event in log[rank] if event.action.kind in PASSES] or [0.0]
        seconds = dict.fromkeys((field.name for field in fields(Idle)), 0.0)
        waited = [0.0, 0.0, 0.0]  # for other ranks' passes: before the first pass, until the last, after it
        for start, end, does in line:
            if isinstance(does, str):
                seconds[does] += end - start
                continue
            for a, b, cause in _causes(lines, does, start, end):
                if cause == "busy":
                    waited[0 if b <= ends[0] else 2 if a >= ends[-1] else 1] += b - a
                else:
                    seconds[cause] += b - a
        for part, all_of_it, own, uneven in zip(ORDERS_OWN, waited, even[rank], measured[rank], strict=True):
            seconds[part] = min(all_of_it, own)
            rest = all_of_it - seconds[part]
            more = min(rest, max(0.0, uneven - own))
            seconds["imbalance"] += more
            seconds["knock_on"] += rest - more
        ranks.append(Idle(**seconds))
    return tuple(ranks)


def mean_idle(ranks: Sequence[Idle]) -> Idle:
    """The mean over ranks, part by part."""
    return Idle(**{name: fmean(rank.parts[name] for rank in ranks) for name in ranks[0].parts})


# ---- steps of passes alone ---------------------------------------------------------------------------------


def measured_passes(timeline: Timeline, *, even: bool = False) -> Timeline:
    """A step's passes in their order and with their times, as if nothing else took time.  Raises ValueError if one
    waits for an action that the timeline lacks."""
    passes = tuple(tuple(action for action in line if action.kind in PASSES) for line in timeline.schedule)
    lines = map(timeline.line, range(len(passes)))
    seconds = {action: end - start for line in lines for action, start, end in line if action.kind in PASSES}
    if even:
        of_kinds: dict[Kind, list[float]] = defaultdict(list)
        for action, took in seconds.items():
            of_kinds[action.kind].append(took)
        means = {kind: fmean(took) for kind, took in of_kinds.items()}
        seconds = {action: means[action.kind] for action in seconds}
    alone, stuck = play(passes, owners(timeline.schedule), seconds.__getitem__, Costs())
    if stuck:
        raise ValueError(f"the log is not of a whole step: {stuck} waits for what no rank has made")
    return alone


def even_passes(timeline: Timeline) -> Timeline:
    """A step's passes with equal times: each takes the mean of its kind, so the total work stays the same."""
    return measured_passes(timeline, even=True)


def _waits_of_passes(timeline: Timeline) -> list[tuple[float, float, float]]:
    """The waits of each rank before its first pass, between its first and last, and after its last."""
    span = timeline.makespan
    return [
        (starts[0], max(0.0, timeline.waits(rank)), span - ends[-1]) if starts else (0.0, 0.0, span)
        for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True))
    ]


# ---- actions and waits of the ranks ------------------------------------------------------------------------

_DOES = dict.fromkeys(PASSES, "busy") | dict.fromkeys(COLLECTIVES | MESSAGES, "communication") | {Kind.UPDATE: "update"}


def _pieces(log: Log, makespan: float) -> list[list[_Piece]]:
    """The pieces of each rank's line from the start of the step to its end, without a gap."""
    owner = owners(schedule_of(log))
    made = {value: event.end for line in log for event in line if (value := makes(event.action))}
    reached = {  # rank -> when it comes to its updates
        rank: next((e.start for e in line if e.action.kind is Kind.UPDATE), 0.0) for rank, line in enumerate(log)
    }
    last_to_update = max(reached, key=reached.__getitem__)
    last_to_end = max(range(len(log)), key=lambda rank: log[rank][-1].end if log[rank] else 0.0)
    lines = []
    for rank, line in enumerate(log):
        pieces: list[_Piece] = []
        now = 0.0
        for event in line:
            value = awaits(event.action, 1 + max(owner))
            other, until = rank, 0.0  # the rank that it waits for, and until when; after that, a message is on its way
            if event.action.kind is Kind.UPDATE:
                other, until = last_to_update, reached[last_to_update]
            elif value in made:
                other, until = owner[value.stage], made[value]
            pieces.append((now, event.start, "other"))
            pieces += _event_pieces(event, rank, other, until)
            now = event.end
        pieces.append((now, makespan, last_to_end))
        lines.append([piece for piece in pieces if piece[1] > piece[0]])
    return lines


def _event_pieces(event: Event, rank: int, other: int, until: float) -> Iterator[_Piece]:
    """The pieces of an event, which waits for another rank until some moment."""
    does, now = _DOES.get(event.action.kind, "other"), event.start
    for span in event.waits:
        yield now, span.start, does
        arrives = min(max(until, span.start), span.end) if other != rank else span.start
        yield span.start, arrives, other
        yield arrives, span.end, "communication"
        now = span.end
    yield now, event.end, does


def _causes(lines: list[list[_Piece]], rank: int, start: float, end: float) -> Iterator[tuple[float, float, str]]:
    """The causes of a wait for a rank from start to end, piece by piece.  The recursion ends, because a rank waits only
    for actions before its own."""
    line = lines[rank]
    index = bisect_right(line, start, key=lambda piece: piece[0]) - 1
    while index < len(line) and line[index][0] < end:
        a, b, does = line[index]
        part = max(a, start), min(b, end)
        if isinstance(does, int):
            yield from _causes(lines, does, *part)
        else:
            yield (*part, does)
        index += 1
