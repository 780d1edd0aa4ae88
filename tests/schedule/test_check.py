"""The proof of a schedule: each kind of mistake, made on purpose, is found, named and marked."""

import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.actions import Action, Kind, Schedule, format_schedule, parse_schedule
from plait.schedule.check import Proof, check, peaks
from plait.schedule.orders import ORDERS, gpipe, interleaved, one_f_one_b, one_stage, write_order, zb_h1
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE


def refused(text: str | Schedule, says: str, **options: bool) -> str:
    """The grid below the reason, after the reason was found right."""
    with pytest.raises(ValueError) as error:
        check(parse_schedule(text) if isinstance(text, str) else text, **options)
    reason, _, grid = str(error.value).partition("\n")
    assert re.fullmatch(says, reason), reason
    return grid


def marked(grid: str) -> list[str]:
    return re.findall(r">(\S+)<", grid)


# ---- what is found ----------------------------------------------------------------------------------------


def test_the_proof() -> None:
    assert check(one_f_one_b(3, 4)) == Proof(3, 4, (0, 1, 2), (3, 2, 1), True)
    assert check(parse_schedule("0F0 1F0 1I0 1W0 0B0")) == Proof(2, 1, (0, 0), (2,), True)


def test_a_full_backward_here_and_parts_there() -> None:
    check(parse_schedule("0F0 0F1 0I0 0B1 0W0\n1F0 1B0 1F1 1I1 1W1"))


def test_the_grid_marks_the_cell() -> None:
    with pytest.raises(ValueError) as error:
        check(parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F0 1B0 1B1"))
    assert str(error.value) == (
        "1F0 is doubled: it is twice on rank 1\nrank 0 |  0F0   0F1   0B0   0B1\nrank 1 | >1F0< >1F0<  1B0   1B1"
    )


def test_of_a_large_schedule_the_grid_shows_the_neighbourhood() -> None:
    schedule = [list(line) for line in one_f_one_b(40, 100)]
    schedule[30][50:52] = reversed(schedule[30][50:52])
    schedule[30].remove(Action(Kind.BACKWARD, 30, 77))
    grid = refused(tuple(map(tuple, schedule)), "30B77 is missing on rank 30")
    assert grid.splitlines()[0].startswith("rank 22 | ...")
    assert marked(grid) == ["?"]
    assert grid.endswith("(24 more ranks)")
    assert max(map(len, grid.splitlines())) < 160


# ---- what is refused: where the schedule is wrong, by what words, and the cells that are marked -------------

SENT = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
SHARDED = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD0 0REDUCE 0UPDATE"
MISTAKES = """
every action once
0F0 0F1 0B0 0B1 | 1F0 1B0 1F1               : 1B1 is missing on rank 1 : ?
0F0 0F1 0B0 0B1 | 1F0 1B0 1B1               : 1F1 is missing on rank 1 : ?
0F0 0B0 | 2F0 2B0                           : stage 1 of 3 is missing. no rank works on it :
0F0 0I0 0B0                                 : 0I0 is doubled. 0B0 is the full backward and does it too : 0I0 0B0
0F0 0I0                                     : 0W0 is missing on rank 0 : ?
0F0 0W0                                     : 0I0 is missing on rank 0 : ?
0F0 0F0 0B0                                 : 0F0 is doubled. it is twice on rank 0 : 0F0 0F0
0F0 0B0 | 1F0 1B0 0F1                       : 0F1 is on rank 1, but stage 0 belongs to rank 0. a stage .* : 0F1
- | -                                       : the schedule is empty. it needs a stage and a microbatch :
                                            : the schedule is empty. it needs a stage and a microbatch :
0F0 0B0 0REDUCE 0UPDATE | 1F0 1B0 1UPDATE   : 1REDUCE is missing on rank 1 : ?
0F0 0B0 0REDUCE_GRAD0 0F1 0B1               : 0REDUCE_GRAD1 is missing on rank 0 : ?

order and deadlock
0B0 0F0                                     : 0B0 is out of order. it needs 0F0, which comes later on rank 0 : 0B0 0F0
0F0 0W0 0I0                                 : 0W0 is out of order. it needs 0I0, which comes later on rank 0 : 0W0 0I0
1F0 0F0 1B0 0B0                             : 1F0 is out of order. it needs 0F0, which comes later on rank 0 : 1F0 0F0
0F0 1F0 0B0 1B0                             : 0B0 is out of order. it needs 1B0, which comes later on rank 0 : 0B0 1B0
0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1           : DEADLOCK : 0B0 1F1
0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1 | 2F0 2F1 2B0 2B1 : DEADLOCK : 0B0 1F1 2F1
0F0 0B0 0F1 0B1 | 1F0 1B0 1F1 1B1 | 2F1 2B1 2F0 2B0 : OF TWO OTHERS : 0B0 1B0 2F1

messages
0SEND_F1 ~                                  : 0SEND_F1 is missing next to 0F1 on rank 0 : 0F1
1RECV_F1 ~                                  : 1RECV_F1 is missing next to 1F1 on rank 1 : 1F1
0RECV_B1 ~                                  : 0RECV_B1 is missing next to 0B1 on rank 0 : 0B1
0F1 0SEND_F1 ~ 0SEND_F1 0F1                 : 0SEND_F1 is out of order. it is before 0F1 : 0SEND_F1 0F1
1RECV_F1 1F1 ~ 1F1 1RECV_F1                 : 1RECV_F1 is out of order. it is after 1F1 : 1F1 1RECV_F1
0RECV_B0 0B0 ~ 0B0 0RECV_B0                 : 0RECV_B0 is out of order. it is after 0B0 : 0B0 0RECV_B0
0SEND_F0 ~ 0SEND_F0 0SEND_F0                : 0SEND_F0 is doubled. it is twice on rank 0 : 0SEND_F0 0SEND_F0
1B0 1SEND_B0 ~ 1B0 1SEND_B0 1SEND_F0        : 1SEND_F0 has no other side.* : 1SEND_F0
0F0 0SEND_F0 0F1 0SEND_F1 ~ 0F0 0F1 0SEND_F1 0SEND_F0 : CROSSED : 0SEND_F1 1RECV_F0
1B0 1SEND_B0 1B1 1SEND_B1 ~ 1B0 1B1 1SEND_B1 1SEND_B0 : CROSSED BACK : 0RECV_B0 1SEND_B1
0SEND_F1 0RECV_B0 0B0 ~ 0RECV_B0 0B0 0SEND_F1 : TOO LATE : 0B0 1F1

sharding
0RESHARD 0UNSHARD ~ 0RESHARD                : 0B0 is out of order. stage 0 is not unsharded here : 0B0
0RESHARD 0UNSHARD ~ 0UNSHARD                : 0UNSHARD is doubled. stage 0 is unsharded already : 0UNSHARD
0RESHARD 0REDUCE_GRAD0 ~ 0RESHARD 0RESHARD  : 0RESHARD is doubled. stage 0 is not unsharded : 0RESHARD
0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD0 ~ 0REDUCE_GRAD0 0UNSHARD 0B0 0RESHARD : GRADIENT : 0REDUCE_GRAD0 0B0
0REDUCE 0UPDATE ~ 0UPDATE 0REDUCE           : 0UPDATE is out of order. 0REDUCE comes later : 0UPDATE 0REDUCE
0REDUCE_GRAD0 0REDUCE ~ 0REDUCE 0REDUCE_GRAD0 : 0REDUCE is out of order. 0REDUCE_GRAD0 .* : 0REDUCE 0REDUCE_GRAD0
"""
"""Schedule : words : marked cells.  ``old ~ new`` changes SENT, or SHARDED under that heading."""

LONG = {
    "DEADLOCK": "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0",
    "OF TWO OTHERS": "deadlock: rank 1 waits at 1B0 for 2B0 of rank 2; rank 2 waits at 2F1 for 1F1 of rank 1",
    "CROSSED": "messages from rank 0 to rank 1 are crossed: rank 0 sends 0SEND_F1 where rank 1 receives 1RECV_F0; .*",
    "CROSSED BACK": "messages from rank 1 to rank 0 .*: rank 1 sends 1SEND_B1 where rank 0 receives 0RECV_B0; .*",
    "TOO LATE": "deadlock: rank 0 waits at 0B0 for 1SEND_B0 of rank 1; rank 1 waits at 1F1 .*",
    "GRADIENT": "0REDUCE_GRAD0 is out of order: 0B0 comes later",
}


def mistakes() -> Iterator[tuple[str, str, list[str]]]:
    for block in MISTAKES.strip().split("\n\n"):
        heading, *rows = block.splitlines()
        right = SHARDED if heading == "sharding" else SENT
        for row in rows:
            text, says, cells = (part.strip() for part in row.split(":"))
            old, change, new = (part.strip() for part in text.partition("~"))
            if change:
                assert old in right
                text = right.replace(f"{old} " if not new else old, new)
            yield text.replace("|", "\n"), LONG.get(says, says), cells.split()


@pytest.mark.parametrize(("text", "says", "cells"), list(mistakes()))
def test_a_mistake_is_named_and_marked(text: str, says: str, cells: list[str]) -> None:
    assert marked(refused(text, says)) == cells


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_stages": 4}, "stage 3 of 4 is missing"),
        ({"num_stages": 2}, "stage 2: there are 2, counted from 0"),
        ({"num_microbatches": 5}, "0F4 is missing on rank 0"),
        ({"num_microbatches": 3}, "microbatch 3: there are 3, counted from 0"),
    ],
)
def test_sizes_that_must_be(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(one_f_one_b(3, 4), **sizes)  # type: ignore[arg-type]


def test_gradients_in_another_order_are_reported_and_refused_if_asked() -> None:
    text = "0F0 0F1 0B1 0B0"
    assert not check(parse_schedule(text)).in_order
    says = r"0B0 adds its gradient after that of microbatch 1: out of order \(.*in the order of microbatches\)"
    assert marked(refused(text, says, in_order=True)) == ["0B0"]
    assert check(parse_schedule("0F0 0F1 0I1 0I0 0W0 0W1"), in_order=True).in_order  # the weight parts add
    assert not check(parse_schedule("0F0 0F1 0I0 0B1 0W0")).in_order


# ---- breaking every order ---------------------------------------------------------------------------------


def completed(name: str) -> Schedule:
    return add_messages(add_step(add_sharding(write_order(name, 4, 3), TABLE["zero3"])))


@pytest.mark.parametrize("name", ORDERS)
def test_any_dropped_or_doubled_action_is_found(name: str) -> None:
    schedule = completed(name)
    for rank, line in enumerate(schedule):
        for i in range(len(line)):
            for broken in (line[:i] + line[i + 1 :], line[: i + 1] + line[i:]):
                with pytest.raises(ValueError, match=r"missing|doubled|out of order"):
                    check((*schedule[:rank], broken, *schedule[rank + 1 :]), num_stages=4, num_microbatches=3)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(ORDERS)),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    swaps=st.integers(1, 3),
)
def test_what_passes_the_check_ends_and_what_hangs_does_not_pass(
    name: str, stages: int, microbatches: int, seed: int, swaps: int
) -> None:
    """The simulator carries schedules out by code of its own: the two agree on every shuffled line."""
    rng = random.Random(seed)
    lines = [list(line) for line in write_order(name, stages, microbatches)]
    for _ in range(swaps):
        line = rng.choice(lines)
        i, j = rng.randrange(len(line)), rng.randrange(len(line))
        line[i], line[j] = line[j], line[i]
    schedule = tuple(map(tuple, lines))
    try:
        check(schedule)
    except ValueError as error:
        if str(error).startswith("deadlock"):
            with pytest.raises(ValueError, match="never ends"):
                simulate(schedule, Costs())
        else:
            assert "out of order" in str(error)
    else:
        simulate(schedule, Costs())
        check(add_messages(schedule))  # and no messages can make it hang


def test_peaks_are_counted_along_a_line() -> None:
    assert peaks(parse_schedule("0F0 0F1 0I0 0F2 0W0 0B1 0B2")) == (3,)
    assert peaks(gpipe(3, 7)) == (7, 7, 7)
    assert peaks(interleaved(8, 8)) == (11, 9, 7, 5)
    assert peaks(zb_h1(3, 2)) == (2, 2, 2)


def test_one_rank_per_stage_means_pipeline_ranks() -> None:
    refused(one_stage(2, num_ranks=2), "0F0 is on rank 1, but stage 0 belongs to rank 0: a stage has one rank")
    assert format_schedule(one_stage(1)) == "0F0 0B0 0REDUCE 0UPDATE"
