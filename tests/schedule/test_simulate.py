"""The simulator against timelines drawn by hand, and against every closed form, rank by rank."""

from itertools import product

import pytest
from waiting import calls_of

from plait.schedule.actions import Schedule, parse_schedule
from plait.schedule.bubbles import bubbles
from plait.schedule.check import peaks
from plait.schedule.orders import ORDERS, one_f_one_b, one_stage, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, Timeline, simulate
from plait.table.cells import TABLE


def chunks_of(name: str) -> tuple[int, ...]:
    """Numbers of stages on each rank: those that the order has, or some of those that one may choose."""
    return (2, 3, 4) if ORDERS[name].takes_chunks else (ORDERS[name].stages_per_rank,)


def waits(timeline: Timeline) -> tuple[float, ...]:
    return tuple(timeline.waits(rank) for rank in range(len(timeline.schedule)))


# ---- drawn ------------------------------------------------------------------------------------------------


def test_a_timeline_as_drawn() -> None:
    """0F0 0F1 .  .  0B0 0B0 .   0B1 0B1
    .   1F0 1B0 1B0 1F1 1B1 1B1"""
    timeline = simulate(one_f_one_b(2, 2), Costs())
    assert timeline.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert timeline.ends == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert timeline.makespan == 9
    assert waits(timeline) == (3, 0)
    assert [timeline.work(r) for r in (0, 1)] == [6, 6]
    assert timeline.idle_share(1) == pytest.approx(1 / 3) == timeline.idle_share()


def test_stages_that_cost_differently() -> None:
    timeline = simulate(one_f_one_b(2, 2), Costs((1, 3), (1, 2), (0, 1)))
    assert timeline.starts == ((0, 1, 7, 13), (1, 4, 7, 10))
    assert timeline.ends == ((1, 2, 8, 14), (4, 7, 10, 13))


@pytest.mark.parametrize(
    ("costs", "arrival"),
    [
        (Costs(latency=0.5), 1.5),
        (Costs(message_bytes=6, bandwidth=4), 2.5),
        (Costs(latency=0.5, message_bytes=6, bandwidth=4), 3.0),
    ],
)
def test_a_message_takes_its_latency_and_its_bytes(costs: Costs, arrival: float) -> None:
    order = parse_schedule("0F0 0B0\n1F0 1B0")
    for schedule in (order, add_messages(order)):
        timeline = simulate(schedule, costs)
        first = next(i for i, a in enumerate(schedule[1]) if str(a) == "1F0")
        assert timeline.starts[1][first] == arrival
        assert timeline.makespan == 2 * arrival + 4


def test_messages_of_one_link_queue_up() -> None:
    """Forwards of 1 each, messages of 3 each: the link is what the second rank waits for."""
    costs = Costs(message_bytes=3, bandwidth=1, latency=0.25)
    order = parse_schedule("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")
    assert simulate(order, costs).starts[1][:3] == (4.25, 7.25, 10.25)
    assert simulate(order, Costs(latency=3.25)).starts[1][:3] == (4.25, 5.25, 6.25)


def test_a_receive_that_is_posted_late_holds_its_message_up() -> None:
    order, costs = one_f_one_b(2, 4), Costs(latency=0.5)
    late, early, at_once = (
        simulate(add_messages(order, ahead=0), costs),
        simulate(add_messages(order, ahead=1), costs),
        simulate(order, costs),
    )
    assert late.makespan > early.makespan == at_once.makespan


def test_gathers_and_reductions_take_the_time_of_their_line() -> None:
    order = parse_schedule("0F0 0B0")
    full = add_step(add_sharding(order, TABLE["zero3"], hold=0))
    timeline = simulate(full, Costs(unshard=0.5, reduce_grad=0.25, reduce=0.125, update=2))
    assert timeline.makespan == 3 + 2 * 0.5 + 0.25 + 0.125 + 2
    assert timeline.work(0) == 3


# ---- beside the line --------------------------------------------------------------------------------------


def test_a_gather_beside_the_line_holds_up_the_first_pass_that_reads_the_stage() -> None:
    """line   0F0 0F1 .   1F0 1F1
    lane   1UNSHARD---"""
    schedule = parse_schedule("1UNSHARD 0F0 0F1 1F0 1F1")
    timeline = simulate(schedule, Costs(unshard=(1, 2.5), overlap=True))
    assert timeline.starts == ((0, 0, 1, 2.5, 3.5),)
    assert timeline.ends == ((2.5, 1, 2, 3.5, 4.5),)
    assert simulate(schedule, Costs(unshard=(1, 2.5))).starts == ((0, 2.5, 3.5, 4.5, 5.5),)


def test_the_lane_carries_one_after_the_other_in_the_order_of_issue() -> None:
    expected = [
        ("0UNSHARD", 0, 1),
        ("0F0", 1, 2),
        ("1UNSHARD", 2, 3),
        ("1F0", 3, 4),
        ("1B0", 4, 6),
        ("1REDUCE_GRAD0", 6, 8),
        ("0UNSHARD", 8, 9),  # after the reduction
        ("0I0", 9, 10),  # waits for the second gather, not the first
        ("0UNSHARD", 10, 11),
        ("0W0", 10, 11),  # reads no parameters
        ("0REDUCE_GRAD0", 11, 13),
        ("1REDUCE", 13, 17),
        ("0REDUCE", 17, 21),
        ("1UPDATE", 21, 21.5),  # waits for the whole lane
        ("0UPDATE", 21.5, 22),
    ]
    schedule = parse_schedule(" ".join(action for action, _, _ in expected))
    timeline = simulate(schedule, Costs(unshard=1, reduce_grad=2, reduce=4, update=0.5, overlap=True))
    assert list(zip(map(str, schedule[0]), timeline.starts[0], timeline.ends[0], strict=True)) == expected


def test_every_rank_has_its_own_lane() -> None:
    timeline = simulate(one_stage(2, num_ranks=2), Costs(reduce=4, update=1, overlap=True))
    assert timeline.starts[0] == timeline.starts[1] == (0, 1, 3, 4, 6, 10)


def test_a_reduction_that_outlasts_its_line_ends_the_step() -> None:
    schedule = parse_schedule("0F0 1F0 1B0 1REDUCE 0B0")
    assert simulate(schedule, Costs(reduce=9, overlap=True)).makespan == 4 + 9


@pytest.mark.parametrize("name", ORDERS)
def test_a_lane_never_makes_a_step_longer(name: str) -> None:
    for stages, m in ((1, 3), (4, 2), (6, 7)):
        full = add_messages(add_step(add_sharding(write_order(name, stages, m), TABLE["zero3"])))
        costs = {"unshard": 0.5, "reduce_grad": 0.25, "reduce": 0.125, "update": 2}
        on, beside = simulate(full, Costs(**costs)), simulate(full, Costs(**costs, overlap=True))
        assert beside.makespan <= on.makespan
        free = simulate(full, Costs(overlap=True))
        assert (free.starts, free.ends) == (simulate(full, Costs()).starts, simulate(full, Costs()).ends)


def test_the_memory_curve() -> None:
    timeline = simulate(parse_schedule("0F0 1F0 1I0 0B0 1W0"), Costs(activation_bytes=(10, 100)))
    assert timeline.memory(0, Costs(activation_bytes=(10, 100))) == ((0, 0), (0, 10), (1, 110), (5, 100), (6, 0))


@pytest.mark.parametrize("name", ORDERS)
def test_the_memory_curve_rises_to_the_peak_and_falls_to_nothing(name: str) -> None:
    timeline = simulate(write_order(name, 6, 5), Costs())
    for rank, peak in enumerate(peaks(timeline.schedule)):
        curve = timeline.memory(rank, Costs())
        assert max(size for _, size in curve) == peak
        assert curve[-1][1] == 0
        assert list(curve) == sorted(curve, key=lambda point: point[0])


# ---- closed forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_every_closed_form_is_what_the_simulator_finds_rank_by_rank(name: str) -> None:
    held = 0
    times = [(1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 2, 1), (1, 3, 1), (4, 1, 2), (1, 1, 2), (4, 3, 4), (0.5, 0.5, 0.5)]
    for p, m, v in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 7, 8, 12, 16, 24), chunks_of(name)):
        order = write_order(name, p * v, m, v if ORDERS[name].takes_chunks else None)
        for F, I, W in times:  # noqa: E741
            formula = bubbles(ORDERS[name].formula, p * v, m, v, F, I, W)
            assert formula.peaks in (None, peaks(order))
            if formula.waits is not None:
                timeline = simulate(order, Costs(F, I, W))
                assert waits(timeline) == formula.waits, (p, m, v, F, I, W)
                span = timeline.waits(0) + timeline.work(0)
                assert timeline.waits(0) / span == pytest.approx(formula.idle_share)
                held += 1
    assert held >= 40


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("1f1b", (4, 8, 1, 0, 0, 0), "idle_share"),  # passes that take no time have no share
        ("zb_h2", (4, 6, 1, 1, 1, 1), "waits"),
        ("zbv", (8, 7, 2, 1, 1, 1), "waits"),
        ("zb_h1", (4, 8, 1, 1, 1, 2), "waits"),
        ("interleaved", (8, 5, 2, 1, 1, 1), "waits"),
        ("interleaved", (7, 8, 2, 1, 1, 1), "peaks"),
    ],
)
def test_no_formula_is_given_where_its_condition_fails(name: str, sizes: tuple[int, ...], says: str) -> None:
    assert getattr(bubbles(ORDERS[name].formula, *sizes), says) is None


# ---- size and refusals ------------------------------------------------------------------------------------


def test_work_grows_with_the_actions() -> None:
    """So 256 stages of 1,024 microbatches take seconds."""
    small, large = one_f_one_b(16, 32), one_f_one_b(64, 128)
    assert calls_of(lambda: simulate(large, Costs())) < 1.1 * 16 * calls_of(lambda: simulate(small, Costs()))
    assert simulate(large, Costs()).idle_share() == pytest.approx(63 / 191)


@pytest.mark.parametrize(
    ("schedule", "costs", "says"),
    [
        (one_f_one_b(3, 2), Costs((1.0, 2.0)), "forward has 2 numbers for 3 stages: give one for each, or one for all"),
        (one_f_one_b(3, 2), Costs(weight=-1.0), r"weight is -1\.0 for one stage"),
        (one_f_one_b(3, 2), Costs(bandwidth=0.0), r"bandwidth 0\.0"),
        (
            parse_schedule("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"),
            Costs(),
            "never ends: rank 0 at 0B0, rank 1 at 1F1 waits forever",
        ),
    ],
)
def test_refusals(schedule: Schedule, costs: Costs, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        simulate(schedule, costs)
