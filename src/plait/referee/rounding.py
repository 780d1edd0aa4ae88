"""Measures rounding, in this one place: the largest difference between two honest computations of one number.

A fixed share of the tensor's largest element is the floor.  Honest runs may widen it, by ``MARGIN`` times what they
differ by; nothing else does.
"""

import torch

from plait.referee.values import ROUNDING, rounding

MARGIN = 8.0
"""Times the largest difference of a few honest runs: of a few, the largest is not the largest there can be."""
SMALL = 1e-2
"""A tensor whose largest element is below this share of the largest of all is what larger numbers have left over."""


def tolerance(dtype: torch.dtype, largest: float = 0.0, overall: float = 0.0) -> float:
    """Returns the largest difference of two honest computations of one tensor, in absolute numbers.

    Args:
        largest: the tensor's largest absolute element.
        overall: the largest of all tensors of its kind.
    """
    return rounding(dtype) * max(largest, SMALL * overall)


def last_bits(dtype: torch.dtype, size: float) -> float:
    """The rounding of a number of that size, a few times; nothing is computed in integers and in fp8."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return 4 * torch.finfo(real).eps * size if real in ROUNDING else 0.0
