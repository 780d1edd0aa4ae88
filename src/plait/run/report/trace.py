"""Writes the lanes of a step (``page/lanes.py``) as a trace file that chrome://tracing and Perfetto open.

    rank 0                one process per rank
      compute             passes without their waits, and updates
      messages            gathers, reductions, messages, and waits for them
    rank 0, simulated     the same for the prediction, on the same clock

``X`` events are complete ones, with ``ts`` and ``dur`` in microseconds; ``M`` events name processes and threads, which
count from 1, because some readers take 0 for a system's idle task.

Source: Trace Event Format (Google), https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterable
from typing import Any

from plait.run.report.page.lanes import KINDS

TRACKS = ("compute", "messages")


def trace_json(measured: Iterable[dict[str, Any]], simulated: Iterable[dict[str, Any]]) -> str:
    """The text of the file, from the lanes of each rank."""
    named = {one["name"]: one for one in measured} | {f"{one['name']}, simulated": one for one in simulated}
    events: list[dict[str, Any]] = []
    for process, (name, lanes) in enumerate(named.items(), start=1):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for thread, track in enumerate(TRACKS, start=1):
            place = {"pid": process, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": track}})
            for kind, stage, microbatch, start, end in lanes[track]:
                about = {"stage": stage} | ({"microbatch": microbatch} if microbatch >= 0 else {})
                times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                events.append({"ph": "X", **place, "name": KINDS[kind], **times, "args": about})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
