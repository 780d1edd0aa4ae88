"""Passes, as drawn: the actions that each adds to an order, and their places."""

import pytest

from plait.schedule.actions import MESSAGES, PASSES, Action, Kind, format_schedule, owners, parse_schedule
from plait.schedule.orders import ORDERS, interleaved, one_f_one_b, one_stage, write_order, zbv
from plait.schedule.passes import add_messages, add_sharding, add_step, complete, join_backward
from plait.schedule.pipeline import Pipeline
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE

TWO_STAGES = parse_schedule("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1")
DRAWN = {
    "sends follow what makes them, receives are posted one pass ahead": (
        add_messages(one_f_one_b(2, 3)),
        """
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2
        """,
    ),
    "receives just before what needs them": (
        add_messages(one_f_one_b(2, 2), ahead=0),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
        """,
    ),
    "receives in the order of the sends, though they are needed in another": (
        add_messages(parse_schedule("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1"), ahead=0),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1RECV_F1 1F1 1F0 1B0 1SEND_B0 1B1 1SEND_B1
        """,
    ),
    "ddp": (add_sharding(one_f_one_b(2, 2), TABLE["ddp"]), "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
    "zero2": (
        add_sharding(one_f_one_b(2, 2), TABLE["zero2"]),
        "0F0 0F1 0B0 0REDUCE_GRAD0 0B1 0REDUCE_GRAD1\n1F0 1B0 1REDUCE_GRAD0 1F1 1B1 1REDUCE_GRAD1",
    ),
    "zero3": (
        add_sharding(one_f_one_b(2, 2), TABLE["zero3"]),
        "0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD0 0B1 0RESHARD 0REDUCE_GRAD1\n"
        "1UNSHARD 1F0 1B0 1REDUCE_GRAD0 1F1 1B1 1RESHARD 1REDUCE_GRAD1",
    ),
    "freed after each pass if asked": (
        add_sharding(parse_schedule("0F0 0I0 0W0"), TABLE["hpz"], hold=0),
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0I0 0RESHARD 0W0 0REDUCE_GRAD0",
    ),
    "zero3_keep frees only a stage that holds no activation": (
        add_sharding(TWO_STAGES, TABLE["zero3_keep"]),
        "0UNSHARD 0F0 1UNSHARD 1F0 0F1 1F1 1B0 1REDUCE_GRAD0 1B1 1RESHARD 1REDUCE_GRAD1 "
        "0B0 0REDUCE_GRAD0 0B1 0RESHARD 0REDUCE_GRAD1",
    ),
    "the end of a step": (
        add_step(parse_schedule("0F0 1F0 1B0 0B0")),
        "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE 0UPDATE 1UPDATE",
    ),
    "one stage": (add_step(write_order("naive", 1, 3)), format_schedule(one_stage(3))),
}


@pytest.mark.parametrize("name", DRAWN)
def test_as_drawn(name: str) -> None:
    schedule, drawing = DRAWN[name]
    assert format_schedule(schedule) == format_schedule(parse_schedule(drawing))


# ---- messages ---------------------------------------------------------------------------------------------


def test_no_message_inside_a_rank() -> None:
    tip = add_messages(zbv(4, 1))[1]
    assert [str(a) for a in tip if a.kind in MESSAGES] == ["1RECV_F0", "2RECV_B0", "2SEND_F0", "1SEND_B0"]
    assert not any(a.kind in MESSAGES for line in add_messages(interleaved(4, 3, chunks=4)) for a in line)


def test_two_messages_per_cut_and_microbatch() -> None:
    for name, cuts in (("1f1b", 5), ("interleaved", 5), ("zbv", 4)):  # the tip of a V is no cut
        messages = [a for line in add_messages(write_order(name, 6, 7)) for a in line if a.kind in MESSAGES]
        assert len(messages) == cuts * 7 * 2 * 2, name


def test_a_schedule_with_a_hole_is_sent_back() -> None:
    with pytest.raises(ValueError, match="0F1 has no counterpart on stage 1"):
        add_messages(parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0"))


# ---- data parallelism -------------------------------------------------------------------------------------


def test_of_two_stages_on_a_rank_zero3_frees_the_one_that_is_not_next() -> None:
    gathers = {
        row: sum(a.kind is Kind.UNSHARD for a in add_sharding(TWO_STAGES, TABLE[row])[0])
        for row in ("ddp", "zero3_keep", "zero3")
    }
    assert gathers == {"ddp": 0, "zero3_keep": 2, "zero3": 5}


@pytest.mark.parametrize(
    "said",
    [
        "0F0 0B0 0REDUCE\n1F0 1B0 1REDUCE",
        "0F0 0B0 0UPDATE\n1F0 1B0 1UPDATE",
        "0F0 0B0 0REDUCE 0UPDATE\n1F0 1B0 1REDUCE 1UPDATE",
    ],
)
def test_a_schedule_that_says_a_part_of_the_end_of_a_step_gets_the_other(said: str) -> None:
    completed = complete(parse_schedule(said), TABLE["ddp"])
    for rank, line in enumerate(completed):
        assert " ".join(map(str, line)).endswith(f"{rank}REDUCE {rank}UPDATE"), "an update of what nobody has summed"


@pytest.mark.parametrize("name", ORDERS)
def test_passes_only_add(name: str) -> None:
    order = write_order(name, 6, 5)
    completed = add_messages(add_step(add_sharding(order, TABLE["zero3"])))
    assert tuple(tuple(a for a in line if a.kind in PASSES) for line in completed) == order


# ---- backwards in one piece again -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["zb_h1", "zb_h2", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("pipe", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_joined_backwards_take_no_longer_and_send_nothing_later(order: str, pipe: int, microbatches: int) -> None:
    written = Pipeline(order, pipe).written(microbatches)
    joined = join_backward(written)
    owner = owners(written)
    for rank, (before, after) in enumerate(zip(written, joined, strict=True)):
        parts = [part for action in after for part in both_parts(action)]
        assert parts == [part for action in before for part in both_parts(action)], "nothing else is touched"
        for action in after:
            if action.kind is Kind.BACKWARD and action not in before:
                assert owner.get(action.stage - 1, rank) == rank
    costs = Costs(forward=1.0, input=1.0, weight=1.0, latency=0.25)
    assert simulate(add_messages(joined), costs).makespan <= simulate(add_messages(written), costs).makespan + 1e-9


def both_parts(action: Action) -> list[Action]:
    if action.kind is not Kind.BACKWARD:
        return [action]
    return [Action(kind, action.stage, action.microbatch) for kind in (Kind.INPUT, Kind.WEIGHT)]


def test_on_two_ranks_zbv_joins_half_of_its_backwards_and_a_first_stage_all() -> None:
    first, second = join_backward(Pipeline("zbv", 2).written(8))
    assert sum(a.kind is Kind.BACKWARD for a in first) == 8 and {a.stage for a in first if a.kind is Kind.BACKWARD} == {
        0
    }
    assert {a.stage for a in second if a.kind is Kind.BACKWARD} == {2}
