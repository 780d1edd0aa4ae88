"""The shape of a difference, of whole tensors and of parts."""

import math

import pytest
import torch
from torch import Tensor

from plait.referee.difference import describe, factor_text

RIGHT = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def changed(at: tuple[slice, ...], value: float | None = None, times: float | None = None) -> Tensor:
    wrong = RIGHT.clone()
    wrong[at] = value if times is None else wrong[at] * times  # type: ignore[assignment]
    return wrong


@pytest.mark.parametrize(
    "ours, pattern, said",
    [
        (RIGHT.clone(), "equal", "equal"),
        (RIGHT * 2, "factor", "2 times what it should be"),
        (-RIGHT / 3, "factor", "-1/3 times what it should be"),
        (RIGHT * 0, "nothing", "zero"),
        (RIGHT[:5], "shape", "5x5 instead of 6x5"),
        (
            changed((slice(2, 3), slice(1, 2)), float("nan")),
            "not finite",
            "not finite in 1 of 30 elements, first at [2, 1]",
        ),
        (
            changed((slice(0, 1), slice(0, 2)), math.inf),
            "not finite",
            "not finite in 2 of 30 elements, first at [0, 0]",
        ),
        (changed((slice(3, 6),), times=2.0), "region", "only indices 3 to 5 of 6 of dim 0: 2 times what it should be"),
        (changed((slice(None), slice(4, 5)), 0.0), "region", "only index 4 of 5 of dim 1: zero"),
        (RIGHT[[1, 0, 2, 3, 5, 4]], "permutation", "the slices of dim 0 are in another order: 1, 0, 2, 3, 5, 4"),
        (RIGHT.t().reshape(6, 5), "permutation", "the same values in other places"),
    ],
)
def test_what_kind_it_is(ours: Tensor, pattern: str, said: str) -> None:
    found = describe(ours, RIGHT)
    assert (found.pattern, found.text) == (pattern, said)


def test_the_last_element_alone() -> None:
    wrong = RIGHT.clone()
    wrong[5, 4] += 1
    found = describe(wrong.reshape(-1), RIGHT.reshape(-1))
    assert found.region == (0, 29, 30) and found.text.startswith("only index 29 of 30 of dim 0: ")


def test_rounding_is_no_difference_where_it_is_allowed() -> None:
    near = RIGHT + 1e-7
    assert describe(near, RIGHT, 1e-5).pattern == "equal"
    assert describe(near, RIGHT).pattern == "noise"
    assert describe(near * 4, RIGHT).pattern == "factor"


def test_what_should_be_zero() -> None:
    assert "where it should be zero" in describe(RIGHT, RIGHT * 0).text


@pytest.mark.parametrize(
    "factor, text",
    [(2.0, "2"), (0.25, "1/4"), (4 / 3, "4/3"), (0.123456, "0.1235"), (-2.0, "-2"), (1.00005, "1.00005")],
)
def test_factors_as_people_write_them(factor: float, text: str) -> None:
    assert factor_text(factor) == text
