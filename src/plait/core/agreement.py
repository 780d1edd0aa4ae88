"""The two small messages of a step on which all ranks agree: their shapes, for those who send and who predict.

    counts   [microbatches, targets, samples]                            int64, before the first forward
    report   [sum of squares, losses of the microbatches, gradient bits]  fp64, before the update

Both are all-gathers in data-rank order, tensor ranks innermost, so that every rank folds the same numbers in the same
order.
"""

from __future__ import annotations

DATA_ORDER = ("replica", "shard")
"""Data-rank order: replica outermost."""

AGREEING = (*DATA_ORDER, "tensor")
"""The axes whose ranks agree.  Tensor ranks of one data rank bring the same batch, and shares of one norm."""

NUMBER_BYTES = 8

BITS = 32
"""Gradient bits per fp64 number; any integer below 2**53 is exact."""

COUNTS = 3
"""Numbers that each rank brings to ``counts``."""


def num_reported(num_microbatches: int, num_trainable: int) -> int:
    """Numbers that each rank brings to ``report``."""
    return 1 + num_microbatches + -(-num_trainable // BITS)
