"""Schedules are text that can be read, written by hand, and read back exactly."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.actions import Action, Kind, format_schedule, parse_action, parse_schedule
from plait.schedule.orders import one_stage

PASS = st.builds(Action, st.sampled_from([Kind.FORWARD, Kind.BACKWARD]), st.integers(0, 99), st.integers(0, 99))
ACTIONS = PASS | st.builds(Action, st.sampled_from([Kind.REDUCE, Kind.UPDATE]), st.integers(0, 99))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_one_stage(num_microbatches: int) -> None:
    drawing = " ".join(f"0F{m} 0B{m}" for m in range(num_microbatches)) + " 0REDUCE 0UPDATE"
    assert format_schedule(one_stage(num_microbatches)) == drawing
    assert parse_schedule(drawing) == one_stage(num_microbatches)
    assert format_schedule(one_stage(num_microbatches, num_ranks=3)) == "\n".join([drawing] * 3)


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
