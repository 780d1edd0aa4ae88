"""Idle time by cause: drawn by hand, against closed forms, and on steps made at random, where the parts must add up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.run.report.idle import Idle, even_passes, idle_times, mean_idle, measured_passes
from plait.run.report.measured import as_log, measured_timeline
from plait.schedule.actions import PASSES, Action, Event, Kind, Log, Schedule, Span, owners, parse_action
from plait.schedule.orders import ORDERS, gpipe, one_f_one_b, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE


def event(text: str, start: float, end: float, *waits: tuple[float, float]) -> Event:
    return Event(parse_action(text), start, end, tuple(Span(a, b, "it") for a, b in waits))


def nonzero(idle: Idle) -> dict[str, float]:
    return {part: round(value, 9) for part, value in idle.parts.items() if abs(value) > 1e-9}


# ---- drawn ------------------------------------------------------------------------------------------------


def test_each_moment_has_the_cause_at_the_end_of_the_chain() -> None:
    """All passes take 2.  Rank 2 waits for rank 1, which waits for rank 0."""
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
    zero, one, two = idle_times(log)
    # 0.5 Python, then rank 0 computes for 2 (the order's own), then half a second of Python, then the message
    assert nonzero(two) == {
        "busy": 4,
        "warm_up": 4,  # of 0F0 and 1F0
        "other": 0.5,
        "communication": 1.5 + 1 + 2 + 1 + 0.75,  # two messages, the gather, and after its end two more
        "cool_down": 3.25,
        "update": 2,
    }
    assert nonzero(one) == {
        "busy": 4,
        "warm_up": 2,
        "other": 0.5,
        "communication": 1.5 + 1 + 2 + 1 + 0.75,
        "bubble": 4,
        "cool_down": 1.25,
        "update": 2,
    }
    assert nonzero(zero) == {
        "busy": 4,
        "other": 0.5 + 0.5,
        "communication": 0.25 + 1 + 2 + 1 + 0.75,
        "bubble": 8,
        "update": 2,
    }


def test_an_update_waits_for_the_last_rank_to_reach_it() -> None:
    """The global norm: what the others still compute is their waiting, then comes the collective."""
    log: Log = (
        (event("0F0", 0, 1), event("0B0", 1, 8, (1, 6)), event("0UPDATE", 8, 10, (8.5, 9))),
        (event("1F0", 0, 3, (0, 1)), event("1B0", 3, 5), event("1UPDATE", 5, 9.75, (5, 9))),
    )
    zero, one = idle_times(log)
    assert nonzero(zero) == {"busy": 3, "bubble": 3.5, "imbalance": 0.5, "communication": 1 + 0.5, "update": 1.5}
    assert nonzero(one) == {
        "busy": 4,
        "warm_up": 1,
        "cool_down": 2,
        "communication": 1 + 1,
        "update": 0.75 + 0.25,
    }


def test_a_rank_that_does_nothing_waits_for_the_others() -> None:
    alone = as_log(simulate(gpipe(1, 2), Costs()))
    zero, one = idle_times((*alone, ()))
    assert nonzero(zero) == {"busy": 6}
    assert nonzero(one) == {"cool_down": 6}


def test_a_wait_in_the_midst_of_a_pass_is_communication() -> None:
    """The message was there long ago; the pass gathers a part of its stage."""
    log: Log = ((event("0F0", 0, 4, (1, 3)), event("0B0", 4, 6)),)
    assert nonzero(idle_times(log)[0]) == {"busy": 4, "communication": 2}


# ---- simulated --------------------------------------------------------------------------------------------


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


def test_messages_are_communication_and_what_they_delay_is_knock_on() -> None:
    zero, one = idle_times(as_log(simulate(one_f_one_b(2, 1), Costs(latency=0.25))))
    assert nonzero(zero) == {"busy": 3, "bubble": 3, "communication": 0.5}
    assert nonzero(one) == {"busy": 3, "warm_up": 1, "cool_down": 2, "communication": 0.5}
    ranks = idle_times(as_log(simulate(one_f_one_b(4, 8), Costs(latency=0.25))))
    assert all(
        nonzero(idle).keys() <= {"busy", "warm_up", "bubble", "cool_down", "communication", "knock_on"}
        for idle in ranks
    )
    assert ranks[0].knock_on > 0 and ranks[0].bubble == pytest.approx(9)


def test_the_mean_over_ranks() -> None:
    ranks = idle_times(as_log(simulate(one_f_one_b(2, 2), Costs())))
    assert mean_idle(ranks) == Idle(6, 0.5, 1.5, 1, 0, 0, 0, 0, 0)
    assert mean_idle(ranks).idle == 3
    assert mean_idle(ranks).shares["bubble"] == pytest.approx(1 / 6)


def test_a_log_of_half_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="not of a whole step: rank 0 at 0B0 waits for what no rank has made"):
        idle_times(((event("0F0", 0, 1), event("0B0", 1, 2)), (event("1F0", 1, 2),)))


# ---- at random --------------------------------------------------------------------------------------------


def run(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    pause: Callable[[], float],
    flight: Callable[[], float],
    lead: float = 0.0,
) -> Log:
    """A step as a runtime would carry it out: pauses between actions, messages that fly, collectives inside passes, and
    updates that wait for each other; an action waits after this share of its work.  Independent of the simulator."""
    owner, log, now = owners(schedule), [[] for _ in schedule], [0.0] * len(schedule)  # type: ignore[var-annotated]
    arrives: dict[tuple[str, int, int], float] = {}

    def step(rank: int, action: Action) -> bool:
        start = now[rank] + pause()
        way, other = ("F", action.stage - 1) if action.kind is Kind.FORWARD else ("B", action.stage + 1)
        takes = seconds(action)
        waits, at = [], start + takes * lead
        beside = action.kind in PASSES - {Kind.WEIGHT} and other in owner
        if beside and (way, other, action.microbatch) not in arrives:
            return False
        message = arrives[way, other, action.microbatch] if beside and owner[other] != rank else 0.0
        if message > at:
            waits.append(Span(at, message, "a message"))
            at = message
        at += takes / 2
        gather = flight() if action.kind in PASSES | {Kind.UNSHARD, Kind.UPDATE} else 0.0
        waits.append(Span(at, at + gather, "a collective"))
        end = at + gather + takes * (0.5 - lead)
        log[rank].append(Event(action, start, end, tuple(waits)))
        now[rank] = end
        if action.kind in PASSES - {Kind.WEIGHT}:
            arrives[way, action.stage, action.microbatch] = end + flight()
        return True

    lines = [[action for action in line if action.kind is not Kind.UPDATE] for line in schedule]
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while line and step(rank, line[0]):
                line.pop(0)
                moved = True
    assert not any(lines)
    starts = {rank: now[rank] + pause() for rank, line in enumerate(schedule) if line and line[-1].kind is Kind.UPDATE}
    for rank, start in starts.items():
        first = True
        for action in schedule[rank]:
            if action.kind is Kind.UPDATE and first:
                together = max(starts.values()) + flight()
                now[rank] = together + seconds(action)
                log[rank].append(Event(action, start, now[rank], (Span(start, together, "the norm"),)))
                first = False
            elif action.kind is Kind.UPDATE:
                step(rank, action)
    return tuple(map(tuple, log))


def holds(log: Log) -> tuple[Idle, ...]:
    """What is true of every step."""
    timeline, ranks = measured_timeline(log), idle_times(log)
    for rank, idle in enumerate(ranks):
        assert min(idle.parts.values()) >= 0, idle
        assert idle.busy == pytest.approx(timeline.work(rank), abs=1e-9)
        assert idle.idle == pytest.approx(timeline.makespan - timeline.work(rank), abs=1e-9)
        assert idle.seconds == pytest.approx(timeline.makespan, abs=1e-9)
        assert sum(idle.shares.values()) == pytest.approx(1 if timeline.makespan else 0)
        assert 1 - idle.shares["busy"] == pytest.approx(timeline.idle_share(rank) if timeline.makespan else 1)
    return ranks


names = st.sampled_from(sorted(ORDERS))
few = st.integers(1, 6)


@settings(deadline=None)
@given(names, few, few, st.integers(0, 2**32), st.sampled_from(["none", "zero1", "zero3"]))
def test_the_parts_of_a_real_step_add_up(name: str, stages: int, m: int, seed: int, row: str) -> None:
    schedule = write_order(name, stages, m)
    if row != "none":
        schedule = add_messages(add_step(add_sharding(schedule, TABLE[row])))
    dice = random.Random(seed)
    spread = dice.choice((0.0, 0.1, 1.0))
    holds(
        run(
            schedule,
            lambda action: 1 + spread * dice.random() if action.kind in PASSES else 0.2 * dice.random(),
            lambda: dice.choice((0.0, spread * dice.random())),
            lambda: dice.choice((0.0, dice.random())),
            lead=dice.choice((0.0, 0.01, 0.3)),
        )
    )


times = st.integers(0, 40).map(lambda n: n / 8)


@settings(deadline=None)
@given(names, few, few, st.booleans(), st.data())
def test_the_parts_of_a_simulated_step_add_up(
    name: str, stages: int, m: int, overlap: bool, data: st.DataObject
) -> None:
    schedule = add_messages(add_step(add_sharding(write_order(name, stages, m), TABLE["zero2"])))
    draw = st.tuples(*[times] * stages)
    forward, input_, weight, reduce_grad, reduce, update = (data.draw(draw) for _ in range(6))
    latency, unshard = data.draw(times), data.draw(times)
    costs = Costs(
        forward,
        input_,
        weight,
        latency,
        unshard=unshard,
        reduce_grad=reduce_grad,
        reduce=reduce,
        update=update,
        overlap=overlap,
    )
    ranks = holds(as_log(simulate(schedule, costs)))
    assert all(idle.other == pytest.approx(0, abs=1e-9) for idle in ranks)
    if not any(update):
        assert all(idle.update == 0 for idle in ranks)


@settings(deadline=None)
@given(names, few, few, st.integers(0, 2**32))
def test_passes_that_differ_and_nothing_else_are_imbalance(name: str, stages: int, m: int, seed: int) -> None:
    dice = random.Random(seed)
    log = run(write_order(name, stages, m), lambda action: 1 + dice.random(), lambda: 0.0, lambda: 0.0)
    for idle in holds(log):
        assert (idle.knock_on, idle.communication, idle.other) == pytest.approx((0, 0, 0), abs=1e-9)


@settings(deadline=None)
@given(names, few, few, st.integers(0, 2**32))
def test_equal_passes_are_never_out_of_balance(name: str, stages: int, m: int, seed: int) -> None:
    dice = random.Random(seed)
    takes = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.5, Kind.INPUT: 1.5, Kind.WEIGHT: 1.0}
    log = run(write_order(name, stages, m), lambda a: takes[a.kind], dice.random, dice.random)
    assert all(idle.imbalance == pytest.approx(0, abs=1e-9) for idle in holds(log))
    alone = run(write_order(name, stages, m), lambda a: takes[a.kind], lambda: 0.0, lambda: 0.0)
    simulated = simulate(write_order(name, stages, m), Costs(1.0, 1.5, 1.0))
    for found in (even_passes, measured_passes):
        assert found(measured_timeline(alone)).makespan == pytest.approx(simulated.makespan)
    for rank, idle in enumerate(holds(alone)):
        assert idle.warm_up + idle.bubble + idle.cool_down == pytest.approx(idle.idle, abs=1e-9)
        assert idle.bubble == pytest.approx(simulated.waits(rank), abs=1e-9)
