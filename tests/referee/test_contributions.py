"""The coefficients of a gradient's parts identify the fault of a sum."""

import pytest
import torch

from plait.referee.contributions import contributions, explain

COUNTS = (3.0, 1.0, 4.0, 5.0)


def parts() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(5, 3, generator=generator) * n, torch.randn(7, generator=generator) * n] for n in COUNTS]


def held(*coefficients: float) -> list[torch.Tensor]:
    return [sum(c * part[i] for c, part in zip(coefficients, parts(), strict=True)) for i in range(2)]


@pytest.mark.parametrize(
    "coefficients, said",
    [
        ((1, 1, 1, 1), ""),
        ((2, 2, 2, 2), "every part counts 2 times"),
        ((0.25, 0.25, 0.25, 0.25), "every part counts 1/4 times"),
        ((0, 0, 0, 1), "only part 3 is in it"),
        ((0, 0, 0, 0.5), "only part 3 is in it, counted 1/2 times"),
        ((1, 1, 0, 0), "part 2 and part 3 are missing"),
        ((1, 1, 0, 1), "part 2 is missing"),
        ((2, 2, 0, 2), "part 2 is missing; what is in it is counted 2 times"),
        ((1, 2, 1, 1), "part 1 counts 2 times instead of once"),
        (tuple(13 / 4 / n for n in COUNTS), "a mean of means: each part counts the same, however many terms it has"),
        (
            (1.5, 2, 3, 4),
            "part 0 counts 3/2 times, part 1 counts 2 times, part 2 counts 3 times and part 3 counts 4 times",
        ),
    ],
)
def test_the_fault_of_a_sum_is_told(coefficients: tuple[float, ...], said: str) -> None:
    found = contributions(held(*coefficients), parts())
    assert found.determined and found.rest < 1e-5
    assert found.coefficients == pytest.approx(coefficients, abs=1e-4)
    assert explain(found.coefficients, COUNTS) == said


def test_what_is_no_sum_of_the_parts_leaves_a_rest() -> None:
    other = [torch.ones(5, 3), torch.ones(7)]
    assert contributions(other, parts()).rest > 0.5


def test_parts_that_are_alike_are_not_told_apart() -> None:
    same = [parts()[0], parts()[0], parts()[1]]
    assert not contributions(held(1, 1, 1, 1), same).determined
    few = [[torch.randn(2)] for _ in range(3)]
    assert not contributions([torch.ones(2)], few).determined
