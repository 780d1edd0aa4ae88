"""The causes of the time in which a rank does not compute; they add up to the step.

A rank's waits for passes of others have three causes.  Two imagined steps, in which only the same passes take time,
separate them: before a rank's first pass, between its first and last, and after its last:

    all equal       every pass takes the mean of its kind      a rank's waits are the order's own
    as measured     every pass takes as long as it did         further waits are imbalance
    what happened   messages, collectives, Python as well      further waits are knock-on: the passes came late

No part is below zero.  A wait in an update, and the time from a rank's last action to the end of the step, are waits
after its last pass.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from plait.messages.wording import seconds_text
from plait.run.report.measured import measured_timeline, waits_of_pass
from plait.schedule.actions import MESSAGES, PASSES, Event, Kind, Log, count_stages, owners
from plait.schedule.simulate import COLLECTIVES, Costs, Timeline, play


class Idle(NamedTuple):
    """One rank's seconds of a step, by cause.

    The order itself requires the waits ``warm_up`` before the rank's first pass, ``bubble`` between its first and last,
    and ``cool_down`` after its last.  ``communication`` is sending, gathering and reducing; ``other`` is, for example,
    Python between two actions.
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
        return self._asdict()

    @property
    def shares(self) -> dict[str, float]:
        """Each part divided by the whole step."""
        whole = sum(self) or 1.0
        return {name: part / whole for name, part in self.parts.items()}


Waits = tuple[float, float, float]
"""Seconds before a rank's first pass, between its first and last, and after its last."""


def idle_times(log: Log) -> tuple[Idle, ...]:
    """The seconds of each rank's step by cause.  The waiting of a rank without passes is cool-down."""
    timeline = measured_timeline(log)
    owner, stages = owners(timeline.schedule), count_stages(timeline.schedule)
    even, uneven = (_waits_of_passes(measured_passes(timeline, even=one)) for one in (True, False))
    ranks = []
    parts = ("warm_up", "bubble", "cool_down")
    for rank, line in enumerate(log):
        seconds, waited = _own_time(line, rank, owner, stages, timeline.makespan)
        for part, all_of_it, own, more in zip(parts, waited, even[rank], uneven[rank], strict=True):
            seconds[part] = min(all_of_it, own)
            rest = all_of_it - seconds[part]
            imbalance = min(rest, max(0.0, more - own))
            seconds["imbalance"] += imbalance
            seconds["knock_on"] += rest - imbalance
        ranks.append(Idle(**seconds))
    return tuple(ranks)


def mean_idle(ranks: Sequence[Idle]) -> Idle:
    """The mean over ranks, part by part."""
    return Idle(*map(fmean, zip(*ranks, strict=True)))


def measured_passes(timeline: Timeline, *, even: bool = False) -> Timeline:
    """A step's passes in their order and with their times, as if nothing else took time.  If they are ``even``, each
    takes the mean of its kind, so the total work stays the same."""
    passes = tuple(tuple(action for action in line if action.kind in PASSES) for line in timeline.schedule)
    lines = map(timeline.line, range(len(passes)))
    seconds = {action: end - start for line in lines for action, start, end in line if action.kind in PASSES}
    if even:
        of_kinds: dict[Kind, list[float]] = defaultdict(list)
        for action, took in seconds.items():
            of_kinds[action.kind].append(took)
        means = {kind: fmean(took) for kind, took in of_kinds.items()}
        seconds = {action: means[action.kind] for action in seconds}
    alone, _ = play(passes, owners(timeline.schedule), seconds.__getitem__, Costs())
    return alone


def _waits_of_passes(timeline: Timeline) -> list[Waits]:
    span = timeline.makespan
    return [
        (starts[0], max(0.0, timeline.waits(rank)), span - ends[-1]) if starts else (0.0, 0.0, span)
        for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True))
    ]


def _own_time(
    line: Sequence[Event], rank: int, owner: Mapping[int, int], stages: int, makespan: float
) -> tuple[dict[str, float], list[float]]:
    """A rank's seconds by cause without its waits for passes of others, and these waits, as in ``Waits``."""
    seconds, waited = dict.fromkeys(Idle._fields, 0.0), [0.0, 0.0, 0.0]
    now, begun = 0.0, False
    for event in line:
        kind, took = event.action.kind, event.end - event.start
        seconds["other"] += event.start - now
        now = event.end
        if kind in PASSES:
            message, collectives = waits_of_pass(event, rank, owner, stages)
            seconds["busy"] += event.busy
            seconds["communication"] += collectives
            waited[1 if begun else 0] += message
            begun = True
        elif kind is Kind.UPDATE:
            seconds["update"] += event.busy
            waited[2] += took - event.busy
        else:
            seconds["communication" if kind in MESSAGES | COLLECTIVES else "other"] += took
    waited[2] += makespan - now
    return seconds, waited


CAUSES = {name: name.replace("_", "-") for name in Idle._fields} | {"busy": "computes"}
"""The parts of ``Idle``, and their names for people."""


def summary(log: Log, simulated: Timeline) -> str:
    """A line with the step's time and the share in which ranks did not compute, measured and predicted."""
    steps = {"measured": measured_timeline(log), "simulated": simulated}
    return "; ".join(f"{n} {seconds_text(s.makespan)}, idle {s.idle_share():.1%}" for n, s in steps.items())
