"""Pipeline: a rank's stages, the completed and proved lines, and refusals; and how layers are shared among stages."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from plait.schedule.actions import Kind, Schedule, format_schedule, owners, parse_schedule
from plait.schedule.check import check
from plait.schedule.orders import ORDERS, one_stage, stages_per_rank, write_order
from plait.schedule.partition import by_sizes, even
from plait.schedule.passes import add_messages
from plait.schedule.pipeline import Pipeline, acks, last_gradients
from plait.table.cells import TABLE

TWO = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
BENT = parse_schedule("0F0 2F0 2B0 0B0\n1F0 1B0")
"""Three stages on two ranks."""


@pytest.mark.parametrize(
    ("pipeline", "name", "num_stages", "owner"),
    [
        (Pipeline(None, 1), None, 1, {0: 0}),
        (Pipeline(None, 3), "1f1b", 3, {0: 0, 1: 1, 2: 2}),
        (Pipeline("gpipe", 2), "gpipe", 2, {0: 0, 1: 1}),
        (Pipeline("1f1b", 1), "1f1b", 1, {0: 0}),
        (Pipeline("interleaved", 2), "interleaved", 4, {0: 0, 1: 1, 2: 0, 3: 1}),
        (Pipeline("interleaved", 2, 3), "interleaved", 6, {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}),
        (Pipeline("interleaved", 1, 3), "interleaved", 3, {0: 0, 1: 0, 2: 0}),
        (Pipeline("zbv", 3), "zbv", 6, {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}),
        (Pipeline("dualpipe_v", 2), "dualpipe_v", 4, {0: 0, 1: 1, 2: 1, 3: 0}),
        (Pipeline(TWO, 2), None, 2, {0: 0, 1: 1}),
        (Pipeline(TWO[::-1], 2), None, 2, {0: 1, 1: 0}),
        (Pipeline(BENT, 2), None, 3, {0: 0, 1: 1, 2: 0}),
    ],
    ids=str,
)
def test_names_stages_and_owners(pipeline: Pipeline, name: str | None, num_stages: int, owner: dict[int, int]) -> None:
    assert (pipeline.name, pipeline.num_stages, dict(pipeline.owner)) == (name, num_stages, owner)


def test_which_orders_split_backwards() -> None:
    assert {order for order in ORDERS if Pipeline(order, 3).splits_backward} == {"zb_h1", "zb_h2", "zbv", "dualpipe_v"}
    assert not Pipeline(None, 1).splits_backward and not Pipeline(TWO, 2).splits_backward
    assert Pipeline(parse_schedule("0F0 0I0 0F1 0B1 0W0\n1F0 1B0 1F1 1B1"), 2).splits_backward


def test_an_order_that_splits_backwards_of_later_microbatches_only() -> None:
    """One microbatch does not show the order of many: stages are built before their number is known."""
    for order, pipe, many in itertools.product(ORDERS, (1, 2, 3, 4), (1, 2, 3, 5, 8, 9)):
        pipeline = Pipeline(order, pipe)
        splits = any(action.kind is Kind.WEIGHT for line in pipeline.written(many) for action in line)
        assert not splits or pipeline.splits_backward, f"{order} on {pipe} with {many}"


def test_completed_in_full() -> None:
    """Gathered once, reduced for each microbatch; receives posted ahead, sums and updates at the end."""
    assert format_schedule(Pipeline("1f1b", 2).completed(2, TABLE["zero3"])).split("\n") == [
        "0RECV_B0 0RECV_B1 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0REDUCE_GRAD0 0B1 0RESHARD 0REDUCE_GRAD1 "
        "0REDUCE 0UPDATE",
        "1RECV_F0 1RECV_F1 1UNSHARD 1F0 1B0 1SEND_B0 1REDUCE_GRAD0 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE_GRAD1 "
        "1REDUCE 1UPDATE",
    ]


def test_without_a_pipeline_nothing_is_added() -> None:
    """Units are gathered one by one then, by the model's own hooks."""
    assert Pipeline(None, 1).completed(3, TABLE["zero3"]) == one_stage(3)
    assert format_schedule(Pipeline(None, 1).evaluated(3, TABLE["zero3"])) == "0F0 0F1 0F2"
    with pytest.raises(ValueError, match="0 microbatches"):
        Pipeline(None, 1).evaluated(0, TABLE["ddp"])


def test_hold_says_how_many_stages_stay_gathered() -> None:
    def gathers(hold: int | None) -> int:
        schedule = Pipeline("interleaved", 2, hold=hold).completed(4, TABLE["zero3"])
        return sum(action.kind is Kind.UNSHARD for line in schedule for action in line)

    assert gathers(0) == 2 * 2 * 2 * 4, "for each pass of 2 ranks x 2 stages x 4 microbatches"
    assert gathers(0) > gathers(1) > gathers(2) == 4
    assert gathers(None) == 0, "units are gathered by themselves then"
    with pytest.raises(ValueError, match="hold is -1: give the number of stages that stay unsharded, from 0"):
        Pipeline("1f1b", 2, hold=-1)


def test_the_last_gradient_of_each_stage() -> None:
    assert last_gradients(Pipeline("1f1b", 2).completed(3, TABLE["ddp"])) == {
        (Kind.BACKWARD, 0, 2),
        (Kind.BACKWARD, 1, 2),
    }
    mixed = parse_schedule("0F0 0F1 0I1 0B0 0W1\n1F0 1I0 1F1 1B1 1W0")
    assert last_gradients(mixed) == {(Kind.WEIGHT, 0, 1), (Kind.WEIGHT, 1, 0)}
    assert last_gradients(one_stage(2)) == {(Kind.BACKWARD, 0, 1)}


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "pipe", "chunks", "words"),
    [
        ("zbv", 2, 3, "3 chunks: zbv decides"),
        (None, 2, 2, "only interleaved takes chunks"),
        (TWO, 2, 2, "2 chunks: only interleaved takes chunks"),
        (TWO, 3, None, "the schedule has 2 lines, .* the mesh has pipe=3: use pipe=2, or write 3 lines"),
        (TWO, 1, None, "the schedule has 2 lines, .* pipe=1: use pipe=2, or write 1 lines"),
        (parse_schedule("0F0 0B0\n1F0"), 2, None, "1B0 is missing"),
        (parse_schedule("0B0 0F0\n1F0 1B0"), 2, None, "0B0"),
        ((), 0, None, "the schedule is empty"),
    ],
    ids=str,
)
def test_refused_when_made(order: object, pipe: int, chunks: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pipeline(order, pipe, chunks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipeline", "many", "words"),
    [
        *((Pipeline(TWO, 2), n, f"written for 2 .* the step brings {n}: give 2, or write it for {n}") for n in (1, 3)),
        *((Pipeline(order, pipe), 0, "0 microbatches") for order, pipe in (("1f1b", 2), (None, 1), ("zbv", 2))),
    ],
)
def test_refused_when_completed(pipeline: Pipeline, many: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pipeline.completed(many, TABLE["ddp"])


# ---- evaluations: forwards alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("name", ORDERS)
def test_the_forwards_of_every_order_are_proved_under_every_row(name: str, row: str) -> None:
    for pipe, num, hold in itertools.product((1, 2, 3), (1, 2, 3, 7), (None, 0, 1, 2)):
        pipeline = Pipeline(name, pipe, hold=hold)
        schedule = pipeline.evaluated(num, TABLE[row])
        passes = [[a for a in line if a.kind is Kind.FORWARD] for line in schedule]
        order = [[a for a in line if a.kind is Kind.FORWARD] for line in pipeline.written(num)]
        assert passes == order, "the order's own"
        kinds = {action.kind for line in schedule for action in line}
        gathers = {Kind.UNSHARD, Kind.RESHARD} if TABLE[row].params.split and hold is not None else set()
        messages = {Kind.SEND_F, Kind.RECV_F} if pipe > 1 else set()
        wanted = {Kind.FORWARD} | messages | (gathers if pipeline.num_stages > 1 else set())
        assert kinds == wanted, "no gradient, no update"


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("written", [TWO, TWO[::-1], BENT])
def test_a_schedule_follows_on_itself_until_there_are_microbatches_enough(written: Schedule, num: int) -> None:
    schedule = Pipeline(written, 2).evaluated(num, TABLE["ddp"])
    for stage, rank in owners(written).items():
        assert [a.microbatch for a in schedule[rank] if a.stage == stage and a.kind is Kind.FORWARD] == [*range(num)]


def test_a_backward_among_forwards_is_refused() -> None:
    assert check(parse_schedule("0F0 0F1\n1F0 1F1"), backward=False).num_stages == 2
    with pytest.raises(ValueError, match="0B0 is missing"):
        check(parse_schedule("0F0\n1F0"))
    for text, surplus in (("0F0 0B0\n1F0 1B0", "0B0"), ("0F0\n1F0 1I0 1W0", "1I0")):
        with pytest.raises(ValueError, match=f"{surplus} has no place here: there are forwards only"):
            check(parse_schedule(text), backward=False)
    with pytest.raises(ValueError, match="1F1 is missing"):
        check(parse_schedule("0F0 0F1\n1F0"), backward=False)


# ---- messages that say that others have arrived ---------------------------------------------------------------


def test_an_activation_says_that_a_gradient_has_arrived() -> None:
    """1F1B on two ranks: F2 leaves rank 0 after B0 has run there, and B0 needed rank 1's gradient."""
    schedule = add_messages(write_order("1f1b", 2, 4))
    assert acks(schedule, 1) == {
        ("F", 1, 0): (),
        ("F", 1, 1): (),
        ("F", 1, 2): (("B", 0, 0),),
        ("F", 1, 3): (("B", 0, 1),),
    }
    assert acks(schedule, 0) == {("B", 0, m): (("F", 1, m),) for m in range(4)}
    assert set(acks(add_messages(write_order("gpipe", 2, 3)), 1).values()) == {()}, "gpipe says nothing of gradients"
    schedule = add_messages(parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0"))
    assert acks(schedule, 0) == {("B", 0, 1): (("F", 1, 0), ("F", 1, 1)), ("B", 0, 0): ()}, "1F1 was needed first"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 4), (4, 8)])
def test_what_is_said_is_so(order: str, ranks: int, microbatches: int) -> None:
    """The sender of a message had carried out, before, every pass that needed what is said to have arrived; no message
    is said to have arrived twice, and where ranks go on talking, few are left unsaid.
    """
    schedule = add_messages(write_order(order, ranks * stages_per_rank(order), microbatches))
    for rank in range(len(schedule)):
        said = acks(schedule, rank)
        arrived = [message for messages in said.values() for message in messages]
        assert len(arrived) == len(set(arrived))
        for (way, stage, microbatch), messages in said.items():
            send = f"{stage - 1 if way == 'F' else stage + 1}SEND_{way}{microbatch}"
            line = next(words for words in ([str(a) for a in one] for one in schedule) if send in words)
            before = line[: line.index(send)]
            for kind, needed_by, m in messages:
                assert any(f"{needed_by}{k}{m}" in before for k in ("F" if kind == "F" else "BI")), send


def test_as_drawn() -> None:
    assert even(16, 5) == (range(0, 4), range(4, 7), range(7, 10), range(10, 13), range(13, 16))
    assert by_sizes([1, 3, 2], 6) == (range(0, 1), range(1, 4), range(4, 6))
    assert by_sizes((6,), 6) == (range(6),)


@pytest.mark.parametrize("num_links", [1, 2, 7, 16])
def test_every_link_once_and_larger_stages_first(num_links: int) -> None:
    for num_stages in range(1, num_links + 1):
        cut = even(num_links, num_stages)
        assert [link for links in cut for link in links] == list(range(num_links))
        sizes = [len(links) for links in cut]
        assert len(sizes) == num_stages and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("cut", "given", "stages", "words"),
    [
        (even, 16, 17, "17 stages, .* 16 links .*at most 16"),
        (even, 3, 0, "0 stages: .*at least one"),
        (by_sizes, [1, 3], 6, r"a split of 1 \+ 3 = 4 links, but the model has 6"),
        (by_sizes, [4, 3], 6, r"4 \+ 3 = 7 links"),
        (by_sizes, [6, 0], 6, r"6 \+ 0 = 6 links.* give each stage at least one, 6 together"),
        (by_sizes, [7, -1], 6, r"7 \+ -1 = 6"),
        (by_sizes, [], 6, "a split of nothing = 0 links"),
    ],
)
def test_refusals(cut: Callable[..., Any], given: Any, stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut(given, stages)
