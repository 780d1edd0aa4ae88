"""Schedules are text that can be read, written by hand, and read back exactly."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.actions import Action, Kind, format_schedule, parse_action, parse_schedule
from plait.schedule.orders import one_stage

PER_MICROBATCH = st.builds(
    Action, st.sampled_from([Kind.FORWARD, Kind.BACKWARD]), st.integers(0, 99), st.integers(0, 99)
)
PER_STEP = st.builds(Action, st.sampled_from([Kind.REDUCE, Kind.UPDATE]), st.integers(0, 99))
ACTIONS = PER_MICROBATCH | PER_STEP

# ---- one stage, as drawn ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_microbatches", "drawing"),
    [
        (1, "0F0 0B0 0REDUCE 0UPDATE"),
        (2, "0F0 0B0 0F1 0B1 0REDUCE 0UPDATE"),
        (4, "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0REDUCE 0UPDATE"),
    ],
)
def test_one_stage(num_microbatches: int, drawing: str) -> None:
    assert format_schedule(one_stage(num_microbatches)) == drawing
    assert parse_schedule(drawing) == one_stage(num_microbatches)


def test_every_rank_does_the_same_where_there_is_one_stage() -> None:
    assert format_schedule(one_stage(1, num_ranks=3)) == "\n".join(["0F0 0B0 0REDUCE 0UPDATE"] * 3)


@pytest.mark.parametrize("num_microbatches", [0, -1])
def test_a_step_needs_a_microbatch(num_microbatches: int) -> None:
    with pytest.raises(ValueError, match=f"{num_microbatches} microbatches: a step needs at least one"):
        one_stage(num_microbatches)


# ---- text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(Kind.FORWARD, 0, 3)),
        ("12B0", Action(Kind.BACKWARD, 12, 0)),
        ("0REDUCE", Action(Kind.REDUCE, 0)),
        ("7UPDATE", Action(Kind.UPDATE, 7)),
    ],
)
def test_an_action_is_stage_kind_and_microbatch(text: str, action: Action) -> None:
    assert parse_action(text) == action and str(action) == text


@settings(deadline=None)
@given(action=ACTIONS)
def test_an_action_reads_what_it_prints(action: Action) -> None:
    assert parse_action(str(action)) == action


@settings(deadline=None)
@given(schedule=st.lists(st.lists(ACTIONS, max_size=6).map(tuple), max_size=4).map(tuple))
def test_a_schedule_reads_what_it_prints(schedule: tuple[tuple[Action, ...], ...]) -> None:
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_blank_lines_and_spaces_mean_nothing() -> None:
    assert parse_schedule("\n  0F0   0B0\n\n 1F0 1B0  \n") == parse_schedule("0F0 0B0\n1F0 1B0")


def test_a_rank_that_does_nothing_still_has_its_line() -> None:
    idle = ((Action(Kind.FORWARD, 0, 0),), (), (Action(Kind.FORWARD, 1, 0),))
    assert len(format_schedule(idle).splitlines()) == 3
    assert parse_schedule(format_schedule(idle)) == idle


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0f1", "0F1x", "0", "a0F1", "-1F0", "0 F0", "0FORWARD1"])
def test_what_is_no_action_is_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(text))}.*F, B, REDUCE, UPDATE.*0F3"):
        parse_action(text)


@pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (0, -2)])
def test_what_could_not_be_read_back_cannot_be_made(stage: int, microbatch: int) -> None:
    with pytest.raises(ValueError, match=f"stage {stage}, microbatch {microbatch}: count from 0"):
        Action(Kind.FORWARD if microbatch == 0 else Kind.UPDATE, stage, microbatch)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F", "FORWARD of stage 0 with microbatch -1"),
        ("3B", "BACKWARD of stage 3"),
        ("0REDUCE1", "REDUCE of stage 0 with microbatch 1"),
        ("2UPDATE0", "UPDATE of stage 2 with microbatch 0"),
    ],
)
def test_passes_have_a_microbatch_and_the_rest_has_none(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_action(text)
