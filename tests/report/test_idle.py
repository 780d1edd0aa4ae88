"""Idle time by cause: drawn by hand, against closed forms, and on steps made at random, where the parts must add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.run.report.idle import Idle, idle_times
from plait.run.report.measured import as_log, measured_timeline
from plait.schedule.actions import Event, Log, Span, parse_action
from plait.schedule.orders import ORDERS, gpipe, one_f_one_b, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE


def event(text: str, start: float, end: float, *waits: tuple[float, float]) -> Event:
    return Event(parse_action(text), start, end, tuple(Span(a, b, "it") for a, b in waits))


def nonzero(idle: Idle) -> dict[str, float]:
    return {part: round(value, 9) for part, value in idle.parts.items() if abs(value) > 1e-9}


def test_each_wait_has_its_cause() -> None:
    """All passes take 2.  Rank 2 waits for rank 1, which waits for rank 0; messages take their time."""
    log: Log = (
        (
            event("0F0", 0.5, 2.5),
            event("0SEND_F0", 3, 3.25),
            event("0B0", 3.25, 18, (4, 16.75)),
            event("0UPDATE", 18, 20),
        ),
        (event("1F0", 0, 6, (0, 4)), event("1SEND_F0", 6, 6), event("1B0", 6, 16, (6, 14))),
        (event("2F0", 0, 9, (0, 7)), event("2UNSHARD", 9, 11, (9.5, 11)), event("2B0", 11, 13)),
    )
    zero, one, two = map(nonzero, idle_times(log))
    # The order's own waits: 0, 2 and 4 before the first pass, 8, 4 and 0 between, 0, 2 and 4 after the last.
    late = 12.75 - 8
    assert zero == {"busy": 4, "other": 0.5 + 0.5, "communication": 0.25, "bubble": 8, "knock_on": late, "update": 2}
    assert one == {"busy": 4, "warm_up": 2, "bubble": 4, "cool_down": 2, "knock_on": 2 + 4 + 2}
    assert two == {"busy": 4, "warm_up": 4, "communication": 2, "cool_down": 4, "knock_on": 3 + 3}


def test_an_update_waits_for_the_last_rank_to_reach_it() -> None:
    """For the global norm."""
    log: Log = (
        (event("0F0", 0, 1), event("0B0", 1, 8, (1, 6)), event("0UPDATE", 8, 10, (8.5, 9))),
        (event("1F0", 0, 3, (0, 1)), event("1B0", 3, 5), event("1UPDATE", 5, 9.75, (5, 9))),
    )
    zero, one = idle_times(log)
    assert nonzero(zero) == {"busy": 3, "bubble": 3.5, "imbalance": 0.5, "knock_on": 1 + 0.5, "update": 1.5}
    assert nonzero(one) == {"busy": 4, "warm_up": 1, "cool_down": 2, "knock_on": 2 + 0.25, "update": 0.75}


def test_a_rank_that_does_nothing_waits_for_the_others() -> None:
    alone = as_log(simulate(gpipe(1, 2), Costs()))
    zero, one = idle_times((*alone, ()))
    assert nonzero(zero) == {"busy": 6}
    assert nonzero(one) == {"cool_down": 6}


def test_a_wait_in_the_midst_of_a_pass_is_communication() -> None:
    """The message was there long ago; the pass gathers a part of its stage."""
    log: Log = ((event("0F0", 0, 4, (1, 3)), event("0B0", 4, 6)),)
    assert nonzero(idle_times(log)[0]) == {"busy": 4, "communication": 2}


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (5, 3)])
def test_equal_stages_have_the_bubbles_of_the_closed_form(p: int, m: int) -> None:
    for rank, idle in enumerate(idle_times(as_log(simulate(one_f_one_b(p, m), Costs())))):
        expected = {"busy": 3 * m, "warm_up": rank, "bubble": 3 * (p - 1 - rank), "cool_down": 2 * rank}
        assert nonzero(idle) == {part: value for part, value in expected.items() if value}


def test_a_slow_stage_makes_the_others_wait_and_that_is_imbalance() -> None:
    """Stage 0 takes twice as long as stage 1: in the mean 1.5, 1.5, 1.5."""
    zero, one = idle_times(as_log(simulate(one_f_one_b(2, 8), Costs((2, 1), (2, 1), (2, 1)))))
    assert nonzero(zero) == {"busy": 48, "bubble": 1}  # of the 4.5 it would wait behind an equal stage
    assert nonzero(one) == {"busy": 24, "warm_up": 1.5, "cool_down": 3, "imbalance": 0.5 + 19 + 1}


def test_messages_in_flight_are_knock_on() -> None:
    zero, one = idle_times(as_log(simulate(one_f_one_b(2, 1), Costs(latency=0.25))))
    assert nonzero(zero) == {"busy": 3, "bubble": 3, "knock_on": 0.5}
    assert nonzero(one) == {"busy": 3, "warm_up": 1, "cool_down": 2, "knock_on": 0.5}


names = st.sampled_from(sorted(ORDERS))
few = st.integers(1, 6)
times = st.integers(0, 40).map(lambda n: n / 8)


@settings(deadline=None)
@given(names, few, few, st.booleans(), st.data())
def test_the_parts_of_a_step_add_up(name: str, stages: int, m: int, overlap: bool, data: st.DataObject) -> None:
    schedule = add_messages(add_step(add_sharding(write_order(name, stages, m), TABLE["zero2"])))
    kinds = ("forward", "input", "weight", "unshard", "reduce_grad", "reduce", "update")
    costs = {kind: data.draw(st.tuples(*[times] * stages)) for kind in kinds}
    log = as_log(simulate(schedule, Costs(**costs, latency=data.draw(times), overlap=overlap)))
    timeline = measured_timeline(log)
    for rank, idle in enumerate(idle_times(log)):
        assert min(idle.parts.values()) >= 0, idle
        assert idle.busy == pytest.approx(timeline.work(rank), abs=1e-9)
        assert idle.seconds == pytest.approx(timeline.makespan, abs=1e-9)
        assert sum(idle.shares.values()) == pytest.approx(1 if timeline.makespan else 0)
        assert 1 - idle.shares["busy"] == pytest.approx(timeline.idle_share(rank) if timeline.makespan else 1)
        assert idle.other == pytest.approx(0, abs=1e-9)
        assert any(costs["update"]) or idle.update == 0


@settings(deadline=None)
@given(names, few, few, st.data())
def test_passes_that_differ_are_imbalance_and_equal_ones_never(
    name: str, stages: int, m: int, data: st.DataObject
) -> None:
    schedule, draw = write_order(name, stages, m), st.tuples(*[times.map(lambda n: n + 1)] * stages)
    uneven = simulate(schedule, Costs(*(data.draw(draw) for _ in range(3))))
    for idle in idle_times(as_log(uneven)):
        assert (idle.knock_on, idle.communication, idle.other) == pytest.approx((0, 0, 0), abs=1e-9)
    late = simulate(schedule, Costs(1.0, 1.5, 1.0, latency=data.draw(times)))
    assert all(idle.imbalance == pytest.approx(0, abs=1e-9) for idle in idle_times(as_log(late)))
