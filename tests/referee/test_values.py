"""Every dtype and shape that the engine takes: no mutation passes the referee, and identical pairs are equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from plait.referee.contributions import contributions
from plait.referee.difference import describe
from plait.referee.values import gap, restored, same, storable, wide
from plait.referee.verify.compare import find

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
