"""The clock of deadlines, and calls with a deadline."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from plait.comm import deadline
from plait.comm.deadline import within


def test_a_call_that_never_returns_is_left_behind() -> None:
    held = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, held.wait)
    held.set()
    assert within(30, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(30, lambda: {}["x"])


def test_the_clock_of_deadlines_leaves_out_what_nobody_could_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = deadline.WaitClock()
    for seconds, counted, awake in ((0.5, 0.5, 0.0), (2.0, 2.5, 0.0), (3600.0, 4.5, 4602.5), (1.0, 5.5, 4602.5)):
        now[0] += seconds
        assert (clock(), clock.awake_since()) == (counted, awake)
