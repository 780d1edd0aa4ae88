"""The differences between two checkpoints, tensor by tensor and value by value, to the bit.

model/blocks.0.weight           3 elements of float32 [64, 32], by at most 0.0015
optimizer.param_groups[0].lr    value: 0.001 and 0.0005
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plait.checkpoint.stored import Checkpoint, Stored
from plait.messages.progress import counted

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Named:
    """A tensor among the values."""

    name: str
    tensor: Stored


Difference: TypeAlias = tuple[str, str]
"""A tensor's name or the path to a value, and what differs."""


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    """Compares two checkpoints, but not their ids, files and regions; a block of each is in memory at a time.
    ValueError if one is damaged."""
    one.check()
    other.check()
    if one.manifest.step != other.manifest.step:
        yield "step", f"value: {one.manifest.step} and {other.manifest.step}"
    mine, theirs = one.tensors, other.tensors
    for name in counted("tensors", list(mine | theirs)):
        if not name.startswith("value/"):  # compared among the values
            yield from _tensors(name, mine.get(name), theirs.get(name))
    named = ({name: _Named(name, tensor) for name, tensor in found.items()} for found in (mine, theirs))
    yield from _values("", one.values(next(named)), other.values(next(named)))


def _tensors(name: str, one: Stored | None, other: Stored | None) -> Iterator[Difference]:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        what = "missing" if one is None or other is None else "shape" if one.shape != other.shape else "dtype"
        yield name, f"{what}: {_kind(one)} and {_kind(other)}"
        return
    elements, largest = 0, 0.0
    for region, block in one.blocks(one.region):
        count, difference = _compared(block, other.read(region))
        elements += count
        largest = difference if math.isnan(difference) else max(largest, difference)
    if elements:
        yield name, f"{elements:,} elements of {_kind(one)}, by at most {largest:.3g}"


def _compared(one: Tensor, other: Tensor) -> tuple[int, float]:
    """The number of elements with other bits, and their largest difference."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    a, b = one.reshape(-1), other.reshape(-1)
    bits = _INTEGERS[one.dtype.itemsize]
    apart = a.view(bits) != b.view(bits)
    if not apart.any():
        return 0, 0.0
    return int(apart.sum()), float((a[apart].double() - b[apart].double()).abs().max())


def _kind(one: Stored | None) -> str:
    return "missing" if one is None else f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"


def _values(path: str, one: Any, other: Any) -> Iterator[Difference]:
    if isinstance(one, _Named) and isinstance(other, _Named):
        if one.name != other.name or one.name.startswith("value/"):
            yield from _tensors(path, one.tensor, other.tensor)
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            where = f"{path}.{key}" if path else str(key)
            if key in one and key in other:
                yield from _values(where, one[key], other[key])
            else:
                mine, theirs = (_text(own[key]) if key in own else "missing" for own in (one, other))
                yield where, f"missing: {mine} and {theirs}"
    elif isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from _values(f"{path}[{number}]", *pair)
    elif type(one) is not type(other) or _text(one) != _text(other):
        yield path, f"value: {_text(one)} and {_text(other)}"


def _text(value: Any) -> str:
    """A value with every bit of its numbers."""
    if isinstance(value, _Named):
        return _kind(value.tensor)
    if isinstance(value, Tensor):
        return f"{value.item()!r} ({str(value.dtype).removeprefix('torch.')})"
    return repr(value)
