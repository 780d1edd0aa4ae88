"""Describes the shape of a difference: how large it is, and of which kind.

    all elements times c                  factor        a missing division, a sum that is done twice
    zeros, or almost zeros                nothing       never computed, never sent
    equal except rows 4 to 7 of dim 0     region        one rank's piece, one sample, the last element
    the same values in other places       permutation   pieces put together in another order
    NaN or infinite                       not finite
    none of these                         noise         its size relative to the tensor's

A region has its own difference: its rows may be doubled, or zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from plait.referee.values import finite, gaps, rounding, scale_of, wide

Pattern = Literal["equal", "shape", "not finite", "nothing", "factor", "region", "permutation", "noise"]

LARGEST_DENOMINATOR = 16


@dataclass(frozen=True)
class Discrepancy:
    """The difference between a tensor and the right one.

    ``max_abs`` and ``max_rel`` are max|a - b| and max|a - b| / max|b|.  ``factor`` is the c of a = c * b, in the whole
    tensor or its region.  If only a part differs, ``region`` is its (dim, start, stop) and ``inside`` its pattern.
    """

    pattern: Pattern
    max_abs: float = 0.0
    max_rel: float = 0.0
    factor: float | None = None
    region: tuple[int, int, int] | None = None
    inside: Pattern | None = None
    text: str = "equal"

    def __str__(self) -> str:
        return self.text


def describe(ours: Tensor, theirs: Tensor, within: float = 0.0) -> Discrepancy:
    """Classifies the difference between a tensor and the right one.

    Args:
        ours: the computed tensor.
        theirs: the right tensor, of the same shape.
        within: max|a - b| / max|b| that counts as equal; 0: the same numbers.
    """
    unit = rounding(ours.dtype, 1e-5)
    if ours.shape != theirs.shape:
        return Discrepancy("shape", math.inf, math.inf, text=f"{_size(ours)} instead of {_size(theirs)}")
    parts = ours.is_complex() or theirs.is_complex()
    if parts:
        ours, theirs = ours.to(torch.complex128), theirs.to(torch.complex128)
    gap, a, b = gaps(ours, theirs), wide(ours), wide(theirs)
    odd = (gap > 0) & ~(a.isfinite() & b.isfinite())
    odd = odd.any(-1) if parts else odd
    if odd.any():
        which = "not finite" if (odd & ~finite(ours)).any() else "finite, where it should not be,"
        text = f"{which} in {int(odd.sum())} of {ours.numel()} elements, first at {_first(odd)}"
        return Discrepancy("not finite", math.inf, math.inf, text=text)
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)  # non-finite numbers are the same on both sides
    most, scale = gap.max().item() if gap.numel() else 0.0, scale_of(b)
    relative = most / scale if scale else (math.inf if most else 0.0)
    if relative <= within:
        return Discrepancy("equal", most, relative)
    unit = max(within, unit)
    pattern, factor, text = _whole(a, b, unit)
    if pattern == "noise" and (part := _region(gap > within * scale)) is not None:
        dim, start, stop = part
        cut = a.narrow(dim, start, stop - start), b.narrow(dim, start, stop - start)
        inside, factor, what = _whole(*cut, unit)
        place = f"{_indices(start, stop)} of {a.shape[dim]} of dim {dim}"
        if parts and dim == ours.dim():
            place = f"the {'imaginary' if start else 'real'} part"
        return Discrepancy("region", most, relative, factor, part, inside, f"only {place}: {what}")
    return Discrepancy(pattern, most, relative, factor, text=text)


def _whole(a: Tensor, b: Tensor, unit: float) -> tuple[Pattern, float | None, str]:
    """The pattern of a whole tensor, without looking for a region; its factor; the pattern in words."""
    ours, theirs = a.norm().item(), b.norm().item()
    if ours <= unit * theirs:
        return "nothing", 0.0, "zero" if not ours else f"{ours / theirs:.1g} of what it should be"
    if theirs:
        factor, rest = fitted(a, b)
        scaled = abs(factor - 1) > unit and rest.norm().item() <= unit * abs(factor) * theirs
        if scaled and a.numel() > 1:
            return "factor", factor, f"{factor_text(factor)} times what it should be"
        if scaled:
            times = factor_text(factor)
            simple = f", {times} times" if "." not in times else ""
            return "factor", factor, f"{a.item():.6g} instead of {b.item():.6g}{simple}"
    if (moved := _moved(a, b)) is not None:
        return "permutation", None, moved
    largest = (a - b).abs().max().item()
    beside = f", {largest / b.abs().max().item():.2g} of its largest element" if theirs else ", where it should be zero"
    return "noise", None, f"off by up to {largest:.3g}{beside}"


def fitted(ours: Tensor, theirs: Tensor) -> tuple[float, Tensor]:
    """The c in actual = c * expected + rest by least squares, and the rest, flat in fp64; c is 0 for zeros."""
    a, b = wide(ours).reshape(-1), wide(theirs).reshape(-1)
    square = b.dot(b).item()
    factor = a.dot(b).item() / square if square else 0.0
    return factor, a - factor * b


def factor_text(factor: float) -> str:
    """Writes a factor as people do: 2, 1/4, 4/3, or four digits if no small fraction is near."""
    if not math.isfinite(factor):
        return str(factor)
    near = Fraction(factor).limit_denominator(LARGEST_DENOMINATOR)
    simple = near.denominator == 1 or abs(near.numerator) <= 4 * LARGEST_DENOMINATOR
    if near and simple and near != 1 and abs(float(near) / factor - 1) < 1e-4:
        return str(near)
    text = f"{factor:.4g}"
    return text if float(text) != 1 else f"{factor:.8g}"


def _region(differs: Tensor) -> tuple[int, int, int] | None:
    """The narrowest dim, start and stop outside of which nothing differs; None if the difference is everywhere."""
    best: tuple[float, tuple[int, int, int]] | None = None
    for dim, size in enumerate(differs.shape):
        others = [d for d in range(differs.dim()) if d != dim]
        rows = (differs.any(dim=others) if others else differs).nonzero().reshape(-1).tolist()
        start, stop = rows[0], rows[-1] + 1
        share = (stop - start) / size
        if share < 1 and (best is None or share < best[0]):
            best = share, (dim, start, stop)
    return None if best is None else best[1]


def _moved(a: Tensor, b: Tensor) -> str | None:
    """Says how a tensor has the right values in other places; None if it does not have them."""
    if a.numel() < 2 or not torch.equal(a.reshape(-1).sort().values, b.reshape(-1).sort().values):
        return None
    for dim in range(a.dim()):
        mine, right = ([row.tolist() for row in x.movedim(dim, 0).reshape(x.shape[dim], -1)] for x in (a, b))
        if sorted(mine) == sorted(right):
            return f"the slices of dim {dim} are in another order: {_order(mine, right)}"
    return "the same values in other places"


def _order(mine: Sequence[list[float]], right: Sequence[list[float]]) -> str:
    order = [right.index(row) for row in mine[:8]]
    return ", ".join(map(str, order)) + (" ..." if len(mine) > 8 else "")


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _indices(start: int, stop: int) -> str:
    return f"index {start}" if stop == start + 1 else f"indices {start} to {stop - 1}"


def _first(mask: Tensor) -> str:
    return str(mask.nonzero()[0].tolist()) if mask.dim() else "it"
