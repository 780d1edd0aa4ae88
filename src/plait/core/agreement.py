"""The two small messages of a step on which all ranks agree: their shapes, for those who send and who predict.

    counts   [microbatches, targets, samples]                            int64, before the first forward
    report   [sum of squares, losses of the microbatches, gradient bits,
              where the first gradient is that is not finite]             fp64, before the update

Both are all-gathers in rank order: pipe outermost, then data ranks, tensor ranks innermost.  Every rank folds the same
numbers in the same order.  Losses come from the ranks that have the last stage; the others report zeros.
"""

from __future__ import annotations

DATA_ORDER = ("replica", "shard")
"""Data-rank order: replica outermost."""

IN_STAGE = (*DATA_ORDER, "tensor")
"""The axes whose ranks work on the same stages.  Tensor ranks of one data rank bring the same batch."""

AGREEING = ("pipe", *IN_STAGE)
"""The axes whose ranks agree: all.  Ranks of one data rank, along pipe and tensor, bring the same batch."""

NUMBER_BYTES = 8

BITS = 32
"""Gradient bits per fp64 number; any integer below 2**53 is exact."""

COUNTS = 3
"""Numbers that each rank brings to ``counts``."""


BESIDE = 1
"""Numbers at the end of a ``report``, beside sums, losses and bits."""


def num_reported(num_microbatches: int, num_trainable: int) -> int:
    """Numbers that each rank brings to ``report``."""
    return 1 + num_microbatches + -(-num_trainable // BITS) + BESIDE
