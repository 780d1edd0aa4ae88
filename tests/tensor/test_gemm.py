"""Both ways to multiply against fp64, over every layout of a tensor; what oneDNN does not serve is torch's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.tensor import gemm
from plait.tensor.gemm import GEMMS, ONEDNN, TORCH, Gemm, find_gemm, has_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")

EPS = torch.finfo(torch.float32).eps
SHAPES = [(5,), (1, 5), (7, 5), (33, 1), (1, 1), (48, 129), (3, 7, 5), (1, 1, 17), (2, 3, 5, 9), (257, 511)]


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * sum(shape)))


def within_rounding(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """|got - y| <= n eps/2 (|x| |W|^T + |b|) for sums of n terms, whatever the order in which they are added.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 3.5.
    """
    terms = x.shape[-1] + (bias is not None)
    exact, size = (
        F.linear(f(x.double()), f(weight.double()), None if bias is None else f(bias.double()))
        for f in (Tensor.clone, Tensor.abs)
    )
    assert got.dtype == torch.float32 and got.shape == exact.shape
    over = (got - exact).abs() - terms * EPS / 2 * 1.01 * size
    assert not got.numel() or over.max() <= 0, f"{tuple(x.shape)} {x.stride()} x {tuple(weight.shape)}: {over.max()}"


# ---- which one ------------------------------------------------------------------------------------------------------


def test_the_two_by_name() -> None:
    assert [find_gemm(name) for name in ("torch", "onednn")] == [TORCH, ONEDNN] == list(GEMMS.values())


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="gemm='mkl': give 'torch' or 'onednn'"):
        find_gemm("mkl")


def test_a_torch_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_onednn", lambda: False)
    with pytest.raises(ValueError, match="built without oneDNN: leave it out, or say gemm='torch'"):
        find_gemm("onednn")
    assert find_gemm("torch") is TORCH


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [TORCH, ONEDNN], ids=lambda way: way.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(way: Gemm, shape: tuple[int, ...]) -> None:
    x = draws(*shape)
    for out in (1, 6, 31):
        weight, bias = draws(out, shape[-1], seed=1), draws(out, seed=2)
        within_rounding(way.linear(x, weight, None), x, weight)
        within_rounding(way.linear(x, weight, bias), x, weight, bias)
        within_rounding(way.product(x, weight.t()), x, weight)
        within_rounding(way.product(x, weight.t().contiguous()), x, weight)


@pytest.mark.parametrize("shapes", [((0, 5), (4, 5)), ((2, 0, 5), (4, 5)), ((3, 0), (4, 0)), ((3, 5), (0, 5))])
def test_nothing_to_multiply(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, weight = (draws(*shape) for shape in shapes)
    bias = draws(len(weight))
    assert torch.equal(ONEDNN.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(ONEDNN.product(x, weight.t()), x @ weight.t())


def strided(shape: tuple[int, ...], seed: int) -> Tensor:
    return draws(*(2 * n for n in shape), seed=seed)[tuple(slice(None, None, 2) for _ in shape)]


def by_columns(shape: tuple[int, ...], seed: int) -> Tensor:
    return draws(*shape[::-1], seed=seed).permute(*reversed(range(len(shape))))


def part(shape: tuple[int, ...], seed: int) -> Tensor:
    """Columns of a wider matrix."""
    return draws(*shape[:-1], shape[-1] + 3, seed=seed)[..., 1:-2]


def expanded(shape: tuple[int, ...], seed: int) -> Tensor:
    return draws(*shape[:-2], 1, shape[-1], seed=seed).expand(shape) if len(shape) > 1 else draws(1).expand(shape)


def one_number(shape: tuple[int, ...], seed: int) -> Tensor:
    return draws(1, seed=seed).expand(shape)


def sliding(shape: tuple[int, ...], seed: int) -> Tensor:
    """Windows that overlap, each row a step of one further."""
    flat = draws(math.prod(shape[:-1]) + shape[-1], seed=seed)
    return flat.as_strided(shape, (*(math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)), 1))


LAYOUTS: list[Callable[[tuple[int, ...], int], Tensor]] = [
    *(lambda shape, seed: draws(*shape, seed=seed), strided, by_columns, part, expanded, one_number, sliding)
]


def test_random_shapes_and_layouts() -> None:
    """A thousand products; no layout reads memory that is not its own.

    oneDNN itself takes a bias for contiguous that is not, and refuses a weight whose rows overlap.
    """
    draw = random.Random(0)
    for seed in range(1000):
        lead = [draw.choice((1, 2, 3, 7)) for _ in range(draw.randint(0, 3))]
        k, out = draw.choice((1, 2, 5, 16, 17, 33)), draw.choice((1, 2, 5, 16, 31))
        x, w, b = (draw.choice(LAYOUTS)(shape, seed) for shape in ((*lead, k), (out, k), (out,)))
        within_rounding(ONEDNN.linear(x, w, b), x, w, b)
        within_rounding(ONEDNN.linear(x, w, None), x, w)
        within_rounding(ONEDNN.product(x, w.t()), x, w)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_through(value: float) -> None:
    for row, column in ((0, 0), (3, 16), (6, 8)):
        x, weight, bias = draws(7, 17), draws(5, 17, seed=1), draws(5, seed=2)
        x[row, column] = value
        weight[2, column] = 0
        got, want = ONEDNN.linear(x, weight, bias), F.linear(x, weight, bias)
        assert not want[row].isfinite().any() and bool(want[row, 2].isnan())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
    bias[1] = value
    got = ONEDNN.linear(draws(7, 17), weight, bias)
    assert torch.equal(got.isfinite(), torch.arange(5).ne(1).expand(7, 5))


# ---- the same bits --------------------------------------------------------------------------------------------------


def at(x: Tensor, offset: int) -> Tensor:
    """A copy that begins ``offset`` floats after a multiple of 64 bytes."""
    flat = torch.full((x.numel() + 64,), math.nan)
    start = (offset - flat.data_ptr() // 4) % 16
    copied = flat[start : start + x.numel()].view(x.shape).copy_(x)
    assert copied.data_ptr() // 4 % 16 == offset
    return copied


@pytest.mark.parametrize("sizes", [(7, 17, 5), (1, 64, 33), (64, 64, 64), (33, 130, 257), (48, 1024, 96)])
def test_calls_and_alignments_change_no_bit(sizes: tuple[int, int, int]) -> None:
    rows, k, out = sizes
    x, weight, bias = draws(rows, k), draws(out, k, seed=1), draws(out, seed=2)
    matrix, g = weight.t().contiguous(), draws(rows, out, seed=3)
    first = ONEDNN.linear(x, weight, bias), ONEDNN.product(x, matrix), ONEDNN.product(g.t(), x)
    for i in range(16):
        for j in range(0, 16, 3):
            y = ONEDNN.linear(at(x, i), at(weight, j), at(bias, (i + j) % 16))
            again = y, ONEDNN.product(at(x, i), at(matrix, j)), ONEDNN.product(at(g, i).t(), at(x, j))
            assert all(map(torch.equal, again, first)), f"{i}, {j} floats from a cache line"


def test_onednn_adds_in_another_order_than_torch(onednn_calls: list[Any]) -> None:
    """Otherwise no test could tell which of the two multiplied; in which sizes one can depends on the processor."""
    sizes = [(96, 384, 64), (310, 387, 1), (368, 387, 2), (334, 42, 1)]
    drawn = [(draws(rows, k), draws(out, k, seed=1)) for rows, k, out in sizes]
    linear = [torch.equal(ONEDNN.linear(x, weight, None), F.linear(x, weight)) for x, weight in drawn]
    product = [torch.equal(ONEDNN.product(x, weight.t()), x @ weight.t()) for x, weight in drawn]
    assert not all(linear) and not all(product)
    assert onednn_calls == [(rows, out) for rows, _, out in sizes] * 2


# ---- what torch does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_torchs_to_the_bit(dtype: torch.dtype, onednn_calls: list[Any]) -> None:
    for shape in SHAPES[:-1]:
        x, weight, bias = draws(*shape).to(dtype), draws(6, shape[-1], seed=1).to(dtype), draws(6, seed=2).to(dtype)
        assert torch.equal(ONEDNN.linear(x, weight, bias), F.linear(x, weight, bias))
        assert torch.equal(ONEDNN.linear(x, weight, None), F.linear(x, weight))
        assert torch.equal(ONEDNN.product(x, weight.t()), x @ weight.t())
    assert not onednn_calls


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_mixed_dtypes_raise_what_torch_raises(odd: int, onednn_calls: list[Any]) -> None:
    given = [draws(7, 5), draws(6, 5, seed=1), draws(6, seed=2)]
    given[odd] = given[odd].double()
    told = []
    for way in (TORCH, ONEDNN):
        with pytest.raises(RuntimeError, match="dtype") as error:
            way.linear(*given)
        told.append(str(error.value))
    assert told[0] == told[1] and not onednn_calls


def test_meta_tensors_have_shapes_only(onednn_calls: list[Any]) -> None:
    x, weight = torch.empty(7, 5, device="meta"), torch.empty(6, 5, device="meta")
    assert ONEDNN.linear(x, weight, None).shape == ONEDNN.product(x, weight.t()).shape == (7, 6)
    assert not onednn_calls
