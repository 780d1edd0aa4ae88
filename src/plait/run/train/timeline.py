"""The last steps of a run: the events of its ranks, the step they predict, and the causes of idle time.

    every rank's log of the last steps ──► rank 0 ──► costs of the stages ──► simulator ──► the same step, predicted
                                             └──► trace.json, the report, a line about idle shares

The ranks shown are those of one pipeline (of the first data and tensor rank); without a pipeline, all data ranks.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from plait.comm import Comm
from plait.comm.observer import Observer
from plait.comm.operation import Operation
from plait.comm.texts import gather_bytes
from plait.pipeline.runtime import Handlers
from plait.run.report.idle import idle_times, mean_idle, summary
from plait.run.report.measured import measured_costs, measured_timeline, schedule_of
from plait.schedule.actions import Action, Event, Line, Log, Span, parse_action
from plait.schedule.simulate import Timeline, simulate
from plait.step import Engine

WORTH_BALANCING = 0.1
"""The least share of a step for which a better split is recommended."""


@dataclass(frozen=True)
class Recorded:
    """The last steps of a run on the ranks that are shown, and the step that their costs predict."""

    logs: tuple[Log, ...]
    simulated: Timeline

    @property
    def typical(self) -> Log:
        """The step whose length is the median."""
        return sorted(self.logs, key=lambda log: measured_timeline(log).makespan)[len(self.logs) // 2]

    @property
    def busy(self) -> tuple[float, ...]:
        """The share of the typical step in which each rank computed."""
        timeline = measured_timeline(self.typical)
        return tuple(1 - timeline.idle_share(rank) for rank in range(len(timeline.schedule)))

    @property
    def idle(self) -> tuple[float, float]:
        """The idle share of all ranks together in the typical step, and as simulated."""
        return measured_timeline(self.typical).idle_share(), self.simulated.idle_share()


Wait = tuple[float, float, Operation]
"""The start and the end (``time.perf_counter``) of a rank's wait for others, and its operation."""


class Waits(Observer):
    """The waits of the current action."""

    def __init__(self) -> None:
        self.seen: list[Wait] = []

    def waited(self, operation: Operation, start: float, end: float) -> None:
        self.seen.append((start, end, operation))


class EventLog:
    """The actions of one rank in the last five steps of an engine, with their times; the newest step is the last."""

    def __init__(self, engine: Engine) -> None:
        self.comm = engine.comm
        self._steps: deque[list[tuple[Action, float, float, list[Wait]]]] = deque(maxlen=5)
        engine.placed.runtime.run_line = self.run

    @property
    def steps(self) -> tuple[tuple[Event, ...], ...]:
        """The steps, each with times from its own beginning; waits get their names here, outside a step."""
        return tuple(tuple(_event(step[0][1], *recorded) for recorded in step) for step in self._steps if step)

    def run(self, line: Line, handlers: Handlers) -> None:
        """Carries out one step of this rank, and records it."""
        step: list[tuple[Action, float, float, list[Wait]]] = []
        before, waits = self.comm.observers, Waits()
        self.comm.observers = (*before, waits)
        try:
            for action in line:
                waits.seen = []
                start = time.perf_counter()
                handlers[action.kind](action)
                step.append((action, start, time.perf_counter(), waits.seen))
        finally:
            self.comm.observers = before
        self._steps.append(step)


def _event(zero: float, action: Action, start: float, end: float, waits: Sequence[Wait]) -> Event:
    spans = tuple(Span(begin - zero, stop - zero, str(operation)) for begin, stop, operation in waits)
    return Event(action, start - zero, end - zero, spans)


def record_timeline(engine: Engine, log: EventLog) -> Recorded | None:
    """Brings the logs together on rank 0 (None elsewhere) and predicts the step; all ranks call it together."""
    gathered = gather_bytes(engine.comm, dump(log.steps))
    if gathered is None:
        return None
    logs = tuple(zip(*(load(gathered[rank]) for rank in shown(engine.comm)), strict=True))
    last = schedule_of(logs[-1])
    logs = tuple(log for log in logs if schedule_of(log) == last)  # of one number of microbatches
    if engine.steps == len(logs) > 1:
        logs = logs[1:]  # in the very first step shapes are learned and caches fill
    return Recorded(logs, simulate(last, measured_costs(logs)))


def shown(comm: Comm) -> list[int]:
    """Returns the ranks of one pipeline; with data parallelism alone, one rank of each tensor group."""
    mesh = comm.mesh
    along = ("pipe",) if mesh.pipe > 1 else ("replica", "shard")
    others = [axis for axis in mesh.coordinates(0) if axis not in along]
    return [rank for rank in range(mesh.size) if not any(mesh.coordinates(rank)[axis] for axis in others)]


def show_timeline(recorded: Recorded, console: Console, split: Sequence[int]) -> None:
    """Shows the idle share, as measured and as simulated from the same passes with messages that take no time.
    ``split`` has the number of links on each stage."""
    console.print(summary(recorded.typical, recorded.simulated), soft_wrap=True)
    uneven = mean_idle(idle_times(recorded.typical)).shares["imbalance"]
    if uneven > WORTH_BALANCING:
        text = f"{uneven:.0%} of the step is imbalance of stages: move links from the busiest rank to the others with "
        console.print(f'{text}--split, which is "{" ".join(map(str, split))}" here', soft_wrap=True)


def dump(steps: tuple[tuple[Event, ...], ...]) -> bytes:
    rows = [[[str(e.action), e.start, e.end, [[w.start, w.end, w.what] for w in e.waits]] for e in s] for s in steps]
    return json.dumps(rows).encode()


def load(data: bytes) -> tuple[tuple[Event, ...], ...]:
    def event(action: str, start: float, end: float, waits: list[tuple[float, float, str]]) -> Event:
        return Event(parse_action(action), start, end, tuple(Span(*wait) for wait in waits))

    return tuple(tuple(event(*row) for row in step) for step in json.loads(data))
