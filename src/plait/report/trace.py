"""A step as a trace file that chrome://tracing and Perfetto (ui.perfetto.dev) open.

    rank 0                one process per rank
      compute             0F0 0F1 ...  0B0       passes without their waits, and updates
      communication       0SEND_F0 ... 0REDUCE   messages as they are started, gathers and reductions
      wait                what was waited for
    rank 0, simulated     the same for the prediction, if there is one, on the same clock

The file is the JSON object form of the Trace Event Format: ``X`` (complete) events with ``ts`` and ``dur`` in
microseconds, here to the nanosecond, and ``M`` events that name processes and threads.  On one thread events may not
overlap unless one contains the other; on these tracks none does.  Perfetto chooses the order of
processes; chrome://tracing uses that of the ranks.  Numbers of processes and threads count from 1: 0 is a system's idle
task to some readers.

Source: Trace Event Format (Google), https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain

from plait.schedule.actions import MESSAGES, PASSES, Action, Kind
from plait.schedule.events import Event, Log
from plait.schedule.simulate import COLLECTIVES, Timeline

COMPUTE, COMMUNICATION, WAIT = 1, 2, 3
TRACKS = {COMPUTE: "compute", COMMUNICATION: "communication", WAIT: "wait"}

Json = dict[str, object]


def trace_json(log: Log, simulated: Timeline | None = None) -> str:
    """The text of the file; the simulated step is that of the same schedule, in seconds as well."""
    events: list[Json] = []
    for rank, line in enumerate(log):
        events += _names(rank + 1, f"rank {rank}")
        events += chain.from_iterable(_measured(rank + 1, event) for event in line)
    if simulated is not None:
        for rank, actions in enumerate(simulated.schedule):
            process = len(log) + rank + 1
            events += _names(process, f"rank {rank}, simulated")
            for action, start, end in zip(actions, simulated.starts[rank], simulated.ends[rank], strict=True):
                events += _slice(process, _track(action), str(action), action, start, end)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(process: int, name: str) -> Iterator[Json]:
    """The names of a process and its tracks, and their places from top to bottom."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, track in TRACKS.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _measured(process: int, event: Event) -> Iterator[Json]:
    """An action, in as many parts as its waits leave of it, and the waits.  A collective stays in one part."""
    action, now = event.action, event.start
    for span in event.waits:
        if action.kind not in COLLECTIVES:
            yield from _slice(process, _track(action), str(action), action, now, span.start)
            now = span.end
        yield from _slice(process, WAIT, span.what, action, span.start, span.end)
    yield from _slice(process, _track(action), str(action), action, now, event.end)


def _track(action: Action) -> int:
    return COMMUNICATION if action.kind in MESSAGES | COLLECTIVES else COMPUTE


def _slice(process: int, thread: int, name: str, action: Action, start: float, end: float) -> Iterator[Json]:
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
        "tid": thread,
        "name": name,
        "cat": "wait" if thread == WAIT else _CATEGORIES[action.kind],
        "ts": begin / 1e3,
        "dur": (stop - begin) / 1e3,
        "args": args,
    }


_CATEGORIES = {
    **dict.fromkeys(PASSES, "pass"),
    **dict.fromkeys(MESSAGES, "message"),
    **dict.fromkeys(COLLECTIVES, "collective"),
    Kind.UPDATE: "update",
    Kind.RESHARD: "reshard",
}
"""What a reader can filter by; waits have their own."""
