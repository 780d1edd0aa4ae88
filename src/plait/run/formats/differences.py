"""Finds the differences between two checkpoints, tensor by tensor and value by value, to the bit.

model/blocks.0.weight           3 elements of float32 [64, 32], by at most 0.0015
optimizer.param_groups[0].lr    value: 0.001 and 0.0005
"""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plait.checkpoint.stored import Checkpoint, Stored
from plait.messages.progress import counted

_MISSING = object()

Place: TypeAlias = tuple[Any, ...]
"""The keys that lead to a value, or the name of a tensor."""


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, str]]:
    """Compares two checkpoints, except their ids, files and regions, with a block of each in memory at a time: a
    tensor's name or the path to a value, and its difference in words.  ValueError if one is damaged."""
    one.check()
    other.check()
    mine, theirs = _places(one), _places(other)
    for path in counted("places", list(mine | theirs)):
        a, b = mine.get(path, _MISSING), theirs.get(path, _MISSING)
        difference, kinds = "", f"{_text(a)} and {_text(b)}"
        if isinstance(a, Stored) and isinstance(b, Stored):
            difference = _of_tensors(a, b)
        elif type(a) is not type(b) or _text(a) != _text(b):
            difference = f"{'missing' if a is _MISSING or b is _MISSING else 'value'}: {kinds}"
        if difference:
            yield "".join(map(str, path)).removeprefix("."), difference


def _places(saved: Checkpoint) -> dict[Place, Any]:
    """The tensors by their names, and all values by their paths."""
    found: dict[Place, Any] = {(name,): one for name, one in saved.tensors.items() if not name.startswith("value/")}
    named = {id(tensor) for tensor in found.values()}

    def add(path: Place, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inside in value.items():
                add((*path, ".", key), inside)
        elif isinstance(value, list | tuple) and value:
            for number, inside in enumerate(value):
                add((*path, f"[{number}]" if isinstance(value, list) else f"({number})"), inside)
        elif id(value) not in named:
            found[path] = value

    add((), saved.values())
    return found


def _of_tensors(one: Stored, other: Stored) -> str:
    """The difference between two tensors, in words; empty if there is none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{'shape' if one.shape != other.shape else 'dtype'}: {_text(one)} and {_text(other)}"
    elements, largest = 0, 0.0
    for region, block in one.blocks(one.region):
        count, difference = _compared(block, other.read(region))
        elements += count
        largest = difference if math.isnan(difference) else max(largest, difference)
    return f"{elements:,} elements of {_text(one)}, by at most {largest:.3g}" if elements else ""


def _compared(one: Tensor, other: Tensor) -> tuple[int, float]:
    """The number of elements with other bits, and their largest difference."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    a, b = one.reshape(-1, 1), other.reshape(-1, 1)
    apart = (a.view(torch.uint8) != b.view(torch.uint8)).any(1)
    if not apart.any():
        return 0, 0.0
    return int(apart.sum()), float((a[apart].double() - b[apart].double()).abs().max())


def _text(value: Any) -> str:
    """A value with every bit of its numbers, or the kind of a tensor in a file."""
    if value is _MISSING:
        return "missing"
    if isinstance(value, Stored):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Tensor):
        return f"{value.item()!r} ({str(value.dtype).removeprefix('torch.')})"
    return repr(value)
