"""Timelines and costs from logs written by hand and from simulated steps with known costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.run.report.measured import as_log, measured_costs, measured_timeline
from plait.schedule.actions import Event, Kind, Log, Schedule, Span, parse_action, parse_schedule
from plait.schedule.orders import ORDERS, one_f_one_b, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, Timeline, simulate
from plait.table.cells import TABLE


def event(text: str, start: float, end: float, *waits: tuple[float, float]) -> Event:
    return Event(parse_action(text), start, end, tuple(Span(a, b, "a message") for a, b in waits))


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


def test_a_simulated_step_as_a_log() -> None:
    log = as_log(simulate(add_step(one_f_one_b(2, 1)), Costs(latency=0.5, update=2)))
    assert log[0][1] == Event(parse_action("0B0"), 1, 7, (Span(1, 5, "what 0B0 needs"),))
    assert log[1][0] == Event(parse_action("1F0"), 0, 2.5, (Span(0, 1.5, "what 1F0 needs"),))
    assert [str(e.action) for e in log[1]] == ["1F0", "1B0", "1REDUCE", "1UPDATE"]
    assert log[1][-1] == Event(parse_action("1UPDATE"), 4.5, 6.5)


def test_what_travels_beside_the_line_takes_only_what_it_holds_up() -> None:
    """The gather of stage 1 takes 3, of which stage 0's forward hides 1."""
    schedule = parse_schedule("0F0 1UNSHARD 0F1 1F0 1F1")
    log = as_log(simulate(schedule, Costs(unshard=3, overlap=True)))
    assert [(e.start, e.end, e.busy) for e in log[0]] == [(0, 1, 1), (1, 1, 0), (1, 2, 1), (2, 5, 1), (5, 6, 1)]
    twice = as_log(simulate(parse_schedule("1UNSHARD 2UNSHARD 0F0 1F0 2F0"), Costs(unshard=3, overlap=True)))
    assert [(e.start, e.end, e.busy) for e in twice[0]] == [(0, 0, 0), (0, 0, 0), (0, 1, 1), (1, 4, 1), (4, 7, 1)]


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
