"""Writes a step as a trace file that chrome://tracing and Perfetto (ui.perfetto.dev) open.

    rank 0                one process per rank
      compute             0F0 0F1 ...  0B0       passes without their waits, and updates
      communication       0SEND_F0 ... 0REDUCE   messages as they are started, gathers and reductions
      wait                waits, and their objects
    rank 0, simulated     the same for the prediction, if there is one, on the same clock

``X`` events are complete ones, with ``ts`` and ``dur`` in microseconds, here to the nanosecond; ``M`` events name
processes and threads, which count from 1, because some readers take 0 for a system's idle task.  Events of a thread may
not overlap unless one contains the other; here none does.

Source: Trace Event Format (Google), https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator

from plait.schedule.actions import MESSAGES, PASSES, Action, Event, Kind, Log
from plait.schedule.simulate import COLLECTIVES, Timeline

COMPUTE, COMMUNICATION, WAIT = 1, 2, 3
TRACKS = {COMPUTE: "compute", COMMUNICATION: "communication", WAIT: "wait"}

CATEGORIES = {
    **dict.fromkeys(PASSES, "pass"),
    **dict.fromkeys(MESSAGES, "message"),
    **dict.fromkeys(COLLECTIVES, "collective"),
    Kind.UPDATE: "update",
    Kind.RESHARD: "reshard",
}
"""Categories for filters in the reader; waits have a separate one."""

Json = dict[str, object]


def trace_json(log: Log, simulated: Timeline | None = None) -> str:
    """The text of the file.  The simulated step has the same schedule, and is in seconds as well."""
    processes = {f"rank {rank}": line for rank, line in enumerate(log)}
    if simulated is not None:
        ranks = zip(simulated.schedule, simulated.starts, simulated.ends, strict=True)
        processes |= {f"rank {rank}, simulated": tuple(map(Event, *line)) for rank, line in enumerate(ranks)}
    events: list[Json] = []
    for process, (name, line) in enumerate(processes.items(), start=1):
        events += _names(process, name)
        for event in line:
            events += _slices(process, event)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(process: int, name: str) -> Iterator[Json]:
    """The names of a process and its tracks, and their places from top to bottom."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, track in TRACKS.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slices(process: int, event: Event) -> Iterator[Json]:
    """An action, cut into parts by its waits, and the waits.  A collective stays in one part."""
    action, now = event.action, event.start
    for span in event.waits:
        if action.kind not in COLLECTIVES:
            yield from _slice(process, action, now, span.start)
            now = span.end
        yield from _slice(process, action, span.start, span.end, span.what)
    yield from _slice(process, action, now, event.end)


def _slice(process: int, action: Action, start: float, end: float, waited_for: str = "") -> Iterator[Json]:
    """A complete event, unless it takes less than a nanosecond."""
    begin, stop = round(start * 1e9), round(end * 1e9)
    if stop <= begin:
        return
    args: Json = {"action": str(action), "stage": action.stage, "seconds": (stop - begin) / 1e9}
    if action.microbatch >= 0:
        args["microbatch"] = action.microbatch
    yield {
        "ph": "X",
        "pid": process,
        "tid": WAIT if waited_for else COMMUNICATION if action.kind in MESSAGES | COLLECTIVES else COMPUTE,
        "name": waited_for or str(action),
        "cat": "wait" if waited_for else CATEGORIES[action.kind],
        "ts": begin / 1e3,
        "dur": (stop - begin) / 1e3,
        "args": args,
    }
