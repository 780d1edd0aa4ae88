"""Actions as text, and the orders that are written in them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.actions import Action, Kind, Schedule, format_schedule, owners, parse_action, parse_schedule
from plait.schedule.check import check, peaks
from plait.schedule.orders import ORDERS, interleaved, one_f_one_b, one_stage, stages_per_rank, write_order, zbv
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.table.cells import TABLE

PASS = st.builds(Action, st.sampled_from([Kind.FORWARD, Kind.BACKWARD]), st.integers(0, 99), st.integers(0, 99))
ACTIONS = PASS | st.builds(Action, st.sampled_from([Kind.REDUCE, Kind.UPDATE]), st.integers(0, 99))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_one_stage(num_microbatches: int) -> None:
    drawing = " ".join(f"0F{m} 0B{m}" for m in range(num_microbatches)) + " 0REDUCE 0UPDATE"
    assert format_schedule(one_stage(num_microbatches)) == drawing
    assert parse_schedule(drawing) == one_stage(num_microbatches)
    assert format_schedule(one_stage(num_microbatches, num_ranks=3)) == "\n".join([drawing] * 3)


@settings(deadline=None)
@given(schedule=st.lists(st.lists(ACTIONS, max_size=6).map(tuple), max_size=4).map(tuple))
def test_a_schedule_reads_what_it_prints(schedule: tuple[tuple[Action, ...], ...]) -> None:
    assert parse_schedule(format_schedule(schedule)) == schedule
    assert all(parse_action(str(action)) == action for line in schedule for action in line)
    assert len(format_schedule(schedule).splitlines()) == len(schedule), "an idle rank has its line"


def test_blank_lines_and_spaces_mean_nothing() -> None:
    assert parse_schedule("\n  0F0   0B0\n\n 1F0 1B0  \n") == parse_schedule("0F0 0B0\n1F0 1B0")


KINDS = "F, B, REDUCE, UPDATE.*0F3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, f"{re.escape(repr(text))}.*{KINDS}") for text in ("", "F0", "0X1", "0f1", "0F1x", "0", "a0F1")),
        *((text, f"{re.escape(repr(text))}.*{KINDS}") for text in ("-1F0", "0 F0", "0FORWARD1")),
        ("0F", "FORWARD of stage 0 with microbatch -1"),
        ("3B", "BACKWARD of stage 3"),
        ("0REDUCE1", "REDUCE of stage 0 with microbatch 1"),
        ("2UPDATE0", "UPDATE of stage 2 with microbatch 0"),
    ],
)
def test_what_is_no_action_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_action(text)


@pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (0, -2)])
def test_what_could_not_be_read_back_cannot_be_made(stage: int, microbatch: int) -> None:
    with pytest.raises(ValueError, match=f"stage {stage}, microbatch {microbatch}: count from 0"):
        Action(Kind.FORWARD if microbatch == 0 else Kind.UPDATE, stage, microbatch)


@pytest.mark.parametrize("num_microbatches", [0, -1])
def test_a_step_needs_a_microbatch(num_microbatches: int) -> None:
    with pytest.raises(ValueError, match=f"{num_microbatches} microbatches: a step needs at least one"):
        one_stage(num_microbatches)


DRAWN = {
    ("naive", 2, 2): """
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
    """,
    ("gpipe", 2, 3): """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """,
    ("1f1b", 3, 4): """
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """,
    ("interleaved", 4, 2): """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    ("zb_h1", 3, 4): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """,
    ("zb_h2", 2, 3): """
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """,
    ("zbv", 4, 4): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """,
    ("dualpipe_v", 4, 4): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """,
}


@pytest.mark.parametrize(("name", "stages", "microbatches"), DRAWN)
def test_as_drawn(name: str, stages: int, microbatches: int) -> None:
    assert write_order(name, stages, microbatches) == parse_schedule(DRAWN[name, stages, microbatches])


def test_every_order_is_drawn() -> None:
    assert {name for name, _, _ in DRAWN} == set(ORDERS)


# ---- every size -------------------------------------------------------------------------------------------


def sizes(name: str) -> list[tuple[int, int | None]]:
    """Stages and chunks of 1 to 8 ranks, also such numbers of stages as do not come out even."""
    if ORDERS[name].takes_chunks:
        return [(stages, v) for v in (2, 3, 4) for stages in sorted({*range(1, 9), *(v * p for p in range(1, 9))})]
    return [(stages, None) for stages in range(1, 1 + 8 * ORDERS[name].stages_per_rank)]


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_valid_at_every_size(name: str) -> None:
    for stages, chunks in sizes(name):
        for m in range(1, 17):
            order = write_order(name, stages, m, chunks)
            proof = check(order, num_stages=stages, num_microbatches=m, in_order=True)
            assert len(order) == -(-stages // stages_per_rank(name, chunks))
            assert proof.peaks == peaks(order)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_valid_when_completed(name: str) -> None:
    rows = list(TABLE.values())
    for number, (stages, chunks) in enumerate(sizes(name)):
        for m in (1, 2, 3, 5, 8, 16):
            order = write_order(name, stages, m, chunks)
            row = rows[(number + m) % len(rows)]
            completed = add_messages(add_step(add_sharding(order, row, hold=m % 4)), ahead=m % 3)
            assert check(completed, num_stages=stages, num_microbatches=m, in_order=True).peaks == peaks(order)
        assert parse_schedule(format_schedule(completed)) == completed


# ---- who owns what ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        (one_f_one_b(4, 2), "0 1 2 3"),
        (interleaved(8, 4), "0 1 2 3 0 1 2 3"),
        (interleaved(5, 4), "0 1 2 0 1"),
        (interleaved(6, 4, chunks=3), "0 1 0 1 0 1"),
        (zbv(8, 4), "0 1 2 3 3 2 1 0"),
        (zbv(7, 4), "0 1 2 3 3 2 1"),
    ],
    ids=["1f1b", "interleaved", "uneven", "three chunks", "v", "uneven v"],
)
def test_placements(schedule: Schedule, ranks: str) -> None:
    assert " ".join(map(str, owners(schedule).values())) == ranks


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        *((name, (0, 4), "0 stages: a pipeline has at least one") for name in ORDERS),
        *((name, (4, 0), "0 microbatches: a step needs at least one") for name in ORDERS),
        ("zb_h3", (4, 4), "unknown order 'zb_h3': did you mean zb_h2 or zb_h1"),
        ("1f1b", (4, 4, 2), "2 chunks: 1f1b decides"),
        ("interleaved", (4, 4, 1), "interleaved with 1 stages per rank: give chunks from 2"),
    ],
)
def test_what_no_order_can_be_written_for_is_refused(name: str, sizes: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write_order(name, *sizes)
