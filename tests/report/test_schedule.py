"""The form of a timeline: the grid, and the table."""

from __future__ import annotations

from plait.run.report.schedule import time_grid
from plait.schedule.actions import parse_schedule
from plait.schedule.orders import one_f_one_b, zbv
from plait.schedule.passes import add_messages
from plait.schedule.simulate import Costs, simulate


def test_stages_are_named_where_a_rank_has_several() -> None:
    assert time_grid(simulate(zbv(3, 1), Costs()), 80).splitlines() == [
        "rank 0 | F0  .   .   .   .   .   I0  W0",
        "rank 1 | .   1F0 2F0 2I0 2W0 1I0 1W0 .",
    ]


def test_one_column_is_the_greatest_common_divisor_of_all_times() -> None:
    timeline = simulate(parse_schedule("0F0 0B0"), Costs(forward=0.5, input=0.3, weight=0.45))
    assert time_grid(timeline, 80) == "rank 0 | F0 -- B0 -- --"  # 0.25 each


def test_a_long_grid_goes_on_below_and_a_huge_one_is_left_out() -> None:
    timeline = simulate(add_messages(one_f_one_b(2, 2)), Costs())
    blocks = time_grid(timeline, 22).split("\n\n")
    assert blocks[0].splitlines() == ["rank 0 | F0 F1 .  .", "rank 1 | .  F0 B0 --"]
    assert len(blocks) == 3
    huge = simulate(one_f_one_b(64, 256), Costs())
    assert time_grid(huge, 80).startswith("(no grid: 64 ranks x 957 columns")


def test_an_idle_rank_has_a_line() -> None:
    timeline = simulate(parse_schedule("0F0 0B0\n-"), Costs())
    assert time_grid(timeline, 80).splitlines()[1] == "rank 1 | .  .  ."
