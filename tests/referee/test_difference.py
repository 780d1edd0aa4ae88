"""The shape of a difference, of whole tensors and of parts; no mutation of any dtype and shape passes the referee."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.referee.contributions import contributions, explain
from plait.referee.difference import describe, factor_text
from plait.referee.values import gap, restored, same, storable, wide
from plait.referee.verify.compare import find

RIGHT = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def changed(at: Any, value: float | None = None, times: float | None = None) -> Tensor:
    wrong = RIGHT.clone()
    wrong[at] = value if times is None else wrong[at] * times
    return wrong


@pytest.mark.parametrize(
    "ours, pattern, said",
    [
        (RIGHT.clone(), "equal", "equal"),
        (RIGHT * 2, "factor", "2 times what it should be"),
        (-RIGHT / 3, "factor", "-1/3 times what it should be"),
        (RIGHT * 0, "nothing", "zero"),
        (RIGHT[:5], "shape", "5x5 instead of 6x5"),
        (changed((2, 1), math.nan), "not finite", "not finite in 1 of 30 elements, first at [2, 1]"),
        (changed((0, slice(2)), math.inf), "not finite", "not finite in 2 of 30 elements, first at [0, 0]"),
        (changed(slice(3, 6), times=2.0), "region", "only indices 3 to 5 of 6 of dim 0: 2 times what it should be"),
        (changed((slice(None), 4), 0.0), "region", "only index 4 of 5 of dim 1: zero"),
        (RIGHT[[1, 0, 2, 3, 5, 4]], "permutation", "the slices of dim 0 are in another order: 1, 0, 2, 3, 5, 4"),
        (RIGHT.t().reshape(6, 5), "permutation", "the same values in other places"),
    ],
)
def test_what_kind_it_is(ours: Tensor, pattern: str, said: str) -> None:
    found = describe(ours, RIGHT)
    assert (found.pattern, found.text) == (pattern, said)


def test_the_last_element_alone() -> None:
    found = describe(changed((5, 4), 9.0).reshape(-1), RIGHT.reshape(-1))
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


FP8 = [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith(("float8_e4", "float8_e5"))]
COMPLEX = [torch.complex64, torch.complex128]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, *FP8]
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = {"0-d": (), "1-d": (7,), "2-d": (6, 5), "5-d": (2, 3, 1, 2, 2)}
ODD = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e4m3fn}
"""Dtypes without infinity."""


def right(dtype: torch.dtype, shape: tuple[int, ...], odd: bool = False) -> Tensor:
    """Numbers whose first and last differ; ``odd``: a NaN and an infinity are among them."""
    generator = torch.Generator().manual_seed(1)
    if dtype in INTEGERS:
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1
        return numbers % 2 == 1 if dtype == torch.bool else numbers.to(dtype) + (2**60 if dtype == torch.int64 else 0)
    real = torch.complex128 if dtype in COMPLEX else torch.float64
    numbers = torch.randn(shape, generator=generator, dtype=real).reshape(-1)
    numbers[0], numbers[-1] = 1.5, -0.5
    if dtype in COMPLEX:
        numbers.imag[0], numbers.imag[-1] = 0.75, 2.0
    if odd:
        numbers[1], numbers[2] = torch.nan, torch.inf
    return numbers.reshape(shape).to(dtype)


def put(tensor: Tensor, value: complex | float, at: int = -1) -> Tensor:
    made = tensor.clone().reshape(-1)
    made[at] = value
    return made.reshape(tensor.shape)


def mutations(value: Tensor) -> Iterator[tuple[str, Tensor, str]]:
    """The fault, what it makes of a value, and a part of what is said of it."""
    dtype, many = value.dtype, value.numel() > 1
    if dtype == torch.bool:
        yield "one element", put(value, not value.reshape(-1)[-1]), ""
    elif dtype in INTEGERS:
        yield "one element", put(value, int(value.reshape(-1)[-1]) + 1), ""
    else:
        yield "one element", put(value, 8.0), ""
        yield "NaN put", put(value, torch.nan), "not finite in 1 of"
        if dtype not in ODD:
            yield "infinity put", put(value, -torch.inf), "not finite in 1 of"
        factor, sign = (wide(value) * 2, wide(value) * -1)
        back = torch.view_as_complex if dtype in COMPLEX else lambda x: x
        yield "factor", back(factor).to(dtype), "2 times"
        yield "sign", back(sign).to(dtype), "-1 times"
        yield "lost", torch.zeros(value.shape).to(dtype), "" if value.isnan().any() else "zero"
    if dtype in COMPLEX:
        yield "imaginary part lost", value.real.to(dtype), "only the imaginary part: zero"
        yield "conjugated", value.conj(), "only the imaginary part: -"
        yield "parts swapped", torch.complex(value.imag, value.real), ""
        yield "one part of one element", put(value, complex(value.reshape(-1)[-1].real, 8.0)), ""
        yield "NaN in one part", put(value, complex(0, torch.nan)), "not finite in 1 of"
    if many and (dtype != torch.bool or value.numel() % 2 == 0):
        flat = value.reshape(-1)
        yield "swapped", put(put(value, flat[0].item()), flat[-1].item(), 0), ""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [*COMPLEX, *FLOATS, *INTEGERS], ids=str)
def test_no_mutation_passes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for odd in (False, True) if shape and dtype not in INTEGERS else (False,):
        value = right(dtype, shape, odd)
        again = value.clone()
        assert describe(value, again).pattern == "equal" and same(value, again) and gap(value, again) == 0
        assert find("gradient", "w", value, again).bitwise
        for fault, wrong, said in mutations(value):
            found = describe(wrong, value)
            assert found.pattern != "equal" and (said in found.text or odd), (fault, found)
            assert describe(value, wrong).pattern != "equal" and not same(wrong, value) and gap(wrong, value) > 0, fault
            assert not find("gradient", "w", wrong, value).equal, fault
            if "NaN" in fault:
                assert "finite, where it should not be, in 1 of" in describe(value, wrong).text, fault
                assert not find("gradient", "w", wrong, value, 1e9).equal, fault
                assert not contributions([wrong], [[value]]).determined, fault
        if dtype in COMPLEX and not odd:
            assert contributions([value.imag * 1j], [[value]]).rest > 0.2


@pytest.mark.parametrize("dtype", [*COMPLEX, *FLOATS, *INTEGERS], ids=str)
def test_nothing_equals_nothing_of_the_same_shape_alone(dtype: torch.dtype) -> None:
    none = torch.zeros(3, 0).to(dtype)
    assert describe(none, none.clone()).pattern == "equal" and same(none, none.clone())
    assert find("gradient", "w", none, none.clone()).bitwise
    assert describe(none, none.reshape(0)).pattern == "shape" and not same(none, none.reshape(0))


@pytest.mark.parametrize("dtype", [*COMPLEX, *FLOATS, *INTEGERS], ids=str)
def test_what_is_stored_comes_back(dtype: torch.dtype) -> None:
    value = right(dtype, (6, 5))
    stored = storable({"w": value.conj()})
    assert not any(tensor.is_complex() for tensor in stored.values())
    assert same(restored(stored)["w"], value.conj().resolve_conj())
