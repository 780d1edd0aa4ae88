"""Numbers of every dtype, made comparable in this one place.

dtype                        in fp64                                 equal
fp64, fp32, bf16, fp16, fp8  the same number                         the same number; NaN equals NaN
complex                      [..., 2]: real and imaginary part       both parts
integers, bool               the nearest                             exactly, also beyond 2^53
"""

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The share of a tensor that remains when its only fault, a factor, is removed; by dtype."""

STORED = "#complex"
"""The end of the names of tensors that ``storable`` has written as reals."""
KEY = "plait"
"""The key of the JSON in the metadata of ``packed`` tensors."""


def wide(tensor: Tensor) -> Tensor:
    """A tensor's numbers in fp64; complex ones as [..., 2], their real and imaginary parts."""
    plain = tensor.detach()
    return torch.view_as_real(plain.resolve_conj()).double() if plain.is_complex() else plain.double()


def gaps(one: Tensor, other: Tensor) -> Tensor:
    """|one - other| of each number, shaped as ``wide``: 0 where both are the same number, NaN or infinity, and
    infinite where only one is finite."""
    if one.is_complex() != other.is_complex():
        one, other = one.to(torch.complex128), other.to(torch.complex128)
    a, b = wide(one), wide(other)
    same, apart = (a == b) | (a.isnan() & b.isnan()), (a - b).abs().nan_to_num(torch.inf, torch.inf)
    if one.dtype == other.dtype and not (one.is_complex() or one.is_floating_point()):
        same, apart = one == other, apart.clamp(min=1.0)  # fp64 does not have all integers
    return torch.where(same, 0.0, apart)


def gap(one: Tensor, other: Tensor) -> float:
    """The largest of ``gaps`` between two tensors of equal size; 0 if they are empty."""
    return largest(gaps(one.reshape(-1), other.reshape(-1)))


def same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same dtype, the same shape, and the same number in every element."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and not gap(one, other)


def largest(tensor: Tensor) -> float:
    """The largest absolute number, or NaN if there is one; 0 for an empty tensor."""
    return wide(tensor).abs().max().item() if tensor.numel() else 0.0


def scale_of(tensor: Tensor) -> float:
    """The largest absolute value of the finite numbers."""
    return largest(wide(tensor).nan_to_num(0.0, 0.0, 0.0))


def finite(tensor: Tensor) -> Tensor:
    """True where a number is finite; both parts of a complex one must be."""
    found = wide(tensor).isfinite()
    return found.all(-1) if tensor.is_complex() else found


def rounding(dtype: torch.dtype, other: float = 0.0) -> float:
    """``ROUNDING`` for every dtype; ``other`` for integers."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return ROUNDING.get(real, 2.5 * torch.finfo(real).eps if real.is_floating_point else other)


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as safetensors takes them: complex ones as reals, under a name that says so."""
    return {
        f"{name}{STORED}" if tensor.is_complex() else name: torch.view_as_real(tensor.resolve_conj())
        if tensor.is_complex()
        else tensor
        for name, tensor in tensors.items()
    }


def restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undoes ``storable``."""
    return {
        name.removesuffix(STORED): torch.view_as_complex(tensor) if name.endswith(STORED) else tensor
        for name, tensor in tensors.items()
    }


def packed(about: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """Writes plain data and tensors as safetensors: bytes of another process are never unpickled.

    Args:
        tensors: contiguous, each in its own memory.
    """
    return safetensors.torch.save(storable(tensors), {KEY: json.dumps(about)})


def unpacked(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Undoes ``packed``; SafetensorError, KeyError, TypeError, ValueError or RecursionError for other bytes."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")].decode())
    return json.loads(header["__metadata__"][KEY]), restored(safetensors.torch.load(data))


# ---- rounding: the largest difference between two honest computations of one number

MARGIN = 8.0
"""The factor of the largest difference of a few honest runs: more runs would differ by more."""
SMALL = 1e-2
"""A tensor whose largest element is below this share of the largest of all is the remainder of larger numbers."""


def tolerance(dtype: torch.dtype, largest: float = 0.0, overall: float = 0.0) -> float:
    """Returns the largest difference of two honest computations of one tensor, in absolute numbers.

    Args:
        largest: the tensor's largest absolute element.
        overall: the largest of all tensors of its kind.
    """
    return rounding(dtype) * max(largest, SMALL * overall)


def last_bits(dtype: torch.dtype, size: float) -> float:
    """A few times the rounding of a number of that size; 0 for integers and fp8, in which nothing is computed."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return 4 * torch.finfo(real).eps * size if real in ROUNDING else 0.0
