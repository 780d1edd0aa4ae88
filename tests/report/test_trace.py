"""The trace file: the entries that a viewer needs, read back from the JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.run.report.measured import as_log
from plait.run.report.trace import trace_json
from plait.schedule.actions import Event, Log, Span, parse_action
from plait.schedule.orders import ORDERS, one_f_one_b, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE

LOG: Log = (
    (
        Event(parse_action("0F0"), 0.0, 0.25),
        Event(parse_action("0REDUCE"), 0.25, 1.25, (Span(0.5, 1.0, "reduce_scatter of 'h.0'"),)),
    ),
    (Event(parse_action("1F0"), 0.0, 1.0000015, (Span(0.0, 0.5, "1RECV_F0"), Span(0.75, 0.875, "all_gather"))),),
    (),
)


def read(text: str) -> tuple[list[dict[str, Any]], dict[tuple[int, int | None], str]]:
    """The slices, and the names of processes (pid, None) and of their threads."""
    events = json.loads(text)["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"].endswith("_name")
    }
    return [e for e in events if e["ph"] == "X"], names


def test_slices_stand_on_named_tracks_in_microseconds() -> None:
    slices, names = read(trace_json(LOG))
    found = [(names[e["pid"], None], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in slices]
    assert found == [
        ("rank 0", "compute", "0F0", 0, 250_000),
        ("rank 0", "wait", "reduce_scatter of 'h.0'", 500_000, 500_000),
        ("rank 0", "communication", "0REDUCE", 250_000, 1_000_000),
        ("rank 1", "wait", "1RECV_F0", 0, 500_000),
        ("rank 1", "compute", "1F0", 500_000, 250_000),
        ("rank 1", "wait", "all_gather", 750_000, 125_000),
        ("rank 1", "compute", "1F0", 875_000, 125_001.5),
    ]
    assert names[3, None] == "rank 2"


def test_arguments_say_stage_microbatch_and_seconds() -> None:
    slices, _ = read(trace_json(LOG))
    assert slices[0]["args"] == {"action": "0F0", "stage": 0, "microbatch": 0, "seconds": 0.25}
    assert slices[2]["args"] == {"action": "0REDUCE", "stage": 0, "seconds": 1.0}
    assert [e["cat"] for e in slices[:4]] == ["pass", "wait", "collective", "wait"]


def test_the_simulated_step_is_a_second_set_of_processes() -> None:
    schedule = one_f_one_b(2, 2)
    step = simulate(schedule, Costs())
    slices, names = read(trace_json(as_log(step), step))
    assert [name for (_, thread), name in names.items() if thread is None] == [
        *("rank 0", "rank 1", "rank 0, simulated", "rank 1, simulated")
    ]
    computed = defaultdict(list)
    for e in slices:
        if names[e["pid"], e["tid"]] == "compute":
            computed[names[e["pid"], None]].append((e["name"], e["ts"], e["dur"]))
    assert computed["rank 1"] == computed["rank 1, simulated"] != []
    assert computed["rank 0, simulated"][2] == ("0B0", 4e6, 2e6)


def test_every_metadata_event_has_what_the_format_asks_for() -> None:
    document = json.loads(trace_json(LOG))
    assert document["displayTimeUnit"] == "ms"
    for e in document["traceEvents"]:
        assert e["pid"] > 0
        if e["ph"] == "M":
            key = "sort_index" if e["name"].endswith("sort_index") else "name"
            assert set(e["args"]) == {key}
            assert ("tid" in e) == e["name"].startswith("thread")
        else:
            assert e["tid"] > 0 and e["dur"] > 0 and e["ts"] >= 0


@given(
    st.sampled_from(sorted(ORDERS)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1e-7, 1),
    st.booleans(),
    st.booleans(),
)
def test_slices_of_a_track_do_not_overlap(
    name: str, stages: int, m: int, unit: float, overlap: bool, sends: bool
) -> None:
    """To the nanosecond, whatever the times round to."""
    schedule = write_order(name, stages, m)
    if sends:
        schedule = add_messages(add_step(add_sharding(schedule, TABLE["zero3"])))
    costs = Costs(unit, unit / 3, unit / 7, unit / 11, unshard=unit / 13, reduce=unit / 17, overlap=overlap)
    step = simulate(schedule, costs)
    slices, _ = read(trace_json(as_log(step), step))
    tracks = defaultdict(list)
    for e in slices:
        tracks[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
