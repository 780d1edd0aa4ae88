"""Idle time by cause, timelines and costs: from logs written by hand, and from simulated steps with known costs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import as_log

from plait.run.report.idle import Idle, idle_times
from plait.run.report.measured import measured_costs, measured_timeline
from plait.schedule.actions import Event, Kind, Log, Schedule, Span, parse_action, parse_schedule
from plait.schedule.orders import ORDERS, gpipe, one_f_one_b, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, Timeline, simulate
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
    assert nonzero(zero) == {"busy": 48, "bubble": 1}  # of the 4.5 that it would wait after an equal stage
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
        assert sum(idle) == pytest.approx(timeline.makespan, abs=1e-9)
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


BY_HAND: Log = (
    (event("0F0", 0, 2), event("0SEND_F0", 2, 2.25), event("0B0", 2.25, 9, (2.25, 6)), event("0UPDATE", 9, 10)),
    (event("1F0", 0, 4, (0, 3)), event("1B0", 4, 6, (4.5, 5)), event("1UPDATE", 6, 10, (6.25, 9.25))),
)


def full(order: Schedule) -> Schedule:
    return add_messages(add_step(add_sharding(order, TABLE["zero3"])))


def same(timeline: Timeline, other: Timeline) -> bool:
    ours, others = ([t for lines in (x.starts, x.ends) for line in lines for t in line] for x in (timeline, other))
    return timeline.schedule == other.schedule and ours == pytest.approx(others, abs=1e-9)


def test_a_pass_starts_when_its_waiting_is_over() -> None:
    timeline = measured_timeline(BY_HAND)
    assert timeline.schedule == parse_schedule("0F0 0SEND_F0 0B0 0UPDATE\n1F0 1B0 1UPDATE")
    assert timeline.starts == ((0, 2, 6, 9), (3, 4.5, 6))  # 1B0 waited for half a second in its midst
    assert timeline.ends == ((2, 2.25, 9, 10), (4, 6, 10))
    assert (timeline.work(0), timeline.work(1)) == (5, 2.5)
    assert timeline.makespan == 10 and timeline.idle_share() == pytest.approx(1 - 0.375)


def test_costs_are_without_waits_but_collectives_are_whole() -> None:
    log: Log = (
        (event("0UNSHARD", 0, 1, (0.25, 1)), event("0F0", 1, 3), event("0B0", 3, 7)),
        (event("1F0", 0, 7, (0, 6)), event("1I0", 7, 10), event("1W0", 10, 11), event("1UPDATE", 11, 14, (12, 14))),
    )
    costs = measured_costs([log])
    assert (costs.forward, costs.input, costs.weight) == ((2, 1), (2, 3), (2, 1))
    assert (costs.unshard, costs.reduce_grad, costs.reduce, costs.update) == ((1, 0), (0, 0), (0, 0), (0, 1))


def test_collectives_inside_a_pass_are_costs_of_their_action() -> None:
    """Units are gathered and reduced while the passes run; the pass's wait for its message is not a cost."""
    log: Log = (
        (
            *(event("0UNSHARD", 0, 1), event("0F0", 1, 4, (2, 3)), event("0RESHARD", 4, 4), event("0UNSHARD", 4, 5)),
            *(
                event("0B0", 5, 30, (6, 20), (21, 25), (26, 28)),
                event("0REDUCE_GRAD0", 30, 30.5),
                event("0REDUCE", 31, 31),
            ),
        ),
        (event("1F0", 4, 6, (4, 5)), event("1I0", 6, 9), event("1W0", 9, 20, (10, 14)), event("1REDUCE", 20, 20)),
    )
    costs = measured_costs([log])
    assert (costs.forward, costs.input, costs.weight) == ((2, 1), (2.5, 3), (2.5, 7))
    assert costs.unshard == (1 + 1 / 2, 0)  # one second over two gathers
    assert (costs.reduce_grad, costs.reduce) == ((0.5 + 6, 0), (0, 4))
    busy = simulate(measured_timeline(log).schedule, costs)
    assert busy.ends[1][-1] - busy.ends[1][1] == 7 + 4


def test_costs_are_medians_over_microbatches_and_steps() -> None:
    def step(*forwards: float) -> Log:
        now, line = 0.0, []
        for m, seconds in enumerate(forwards):
            line.append(event(f"0F{m}", now, now := now + seconds))
        line += [event(f"0B{m}", now + m, now + m + 1) for m in range(len(forwards))]
        return (tuple(line),)

    assert measured_costs([step(1, 2, 90)]).forward == (2,)
    assert measured_costs([step(1, 2, 90), step(1, 1, 3), step(2, 2, 2)]).forward == (2,)
    assert measured_costs([step(1, 4)]).forward == (2.5,)


def test_what_a_log_does_not_say_is_as_in_costs() -> None:
    costs, default = measured_costs([BY_HAND]), Costs()
    for field in ("latency", "message_bytes", "bandwidth", "activation_bytes", "overlap"):
        assert getattr(costs, field) == getattr(default, field)


seconds = st.integers(0, 64).map(lambda n: n / 16)


@settings(deadline=None)
@given(st.sampled_from(sorted(ORDERS)), st.integers(1, 6), st.integers(1, 5), st.data())
def test_the_costs_of_a_simulated_step_come_back(name: str, stages: int, m: int, data: st.DataObject) -> None:
    """And so does its timeline; the prediction from the costs is the step itself."""
    order = full(write_order(name, stages, m))
    split = {action.stage for line in order for action in line if action.kind is Kind.WEIGHT}
    per_stage = st.tuples(*[seconds] * stages)
    forward, input_, weight, unshard, reduce, update = (data.draw(per_stage) for _ in range(6))
    weight = tuple(weight[s] if s in split else input_[s] for s in range(stages))  # else each is half of a backward
    costs = Costs(forward, input_, weight, data.draw(seconds), unshard=unshard, reduce=reduce, update=update)
    step = simulate(order, costs)
    log = as_log(step)
    assert same(measured_timeline(log), step)
    found = replace(measured_costs([log]), latency=costs.latency)
    for field in ("forward", "input", "weight", "unshard", "reduce", "update"):
        assert getattr(found, field) == pytest.approx(getattr(costs, field), abs=1e-9), field
    assert same(simulate(order, found), step)


def test_a_whole_backward_where_others_are_split() -> None:
    order = parse_schedule("0F0 0F1 0B0 0I1 0W1")
    split = parse_schedule("0F0 0F1 0I0 0W0 0I1 0W1")
    one, other = (measured_costs([as_log(simulate(each, Costs(1, 2, 3)))]) for each in (order, split))
    assert one == other
