"""The two small messages by which all ranks agree in each step.  Senders and planners share their shapes.

    counts   [microbatches, targets, samples and above them a digest of     int64, before the first forward
              some of their elements, a digest of the frozen]
    report   [sum of squares, losses of the microbatches, gradient bits,    fp64, before the update
              first gradient that is not finite, signal, digest of the position in the run]

Both are all-gathers in rank order, and every rank folds the same numbers in the same order.  Ranks of one data rank,
along pipe and tensor, have the same batch.  Losses come from the ranks with the last stage; the others report zeros.
"""

from plait.table.mesh import Mesh

DATA_ORDER = ("replica", "shard")
"""Data-rank order: replica outermost."""

IN_STAGE = (*DATA_ORDER, "tensor")
"""The axes whose ranks work on the same stages."""

AGREEING = ("pipe", *IN_STAGE)
"""The axes whose ranks agree: all, in rank order."""

NUMBER_BYTES = 8
BITS = 32
"""Gradient bits per fp64 number; any integer below 2**53 is exact."""

COUNTS = 4
"""The number of numbers that a rank adds to ``counts``."""

MARKS = 3
"""The number of numbers at the end of a ``report``, after the bits."""


def counted(mesh: Mesh) -> range:
    """Returns the ranks whose targets add up to the divisor of the loss: one of each data rank, in data-rank order."""
    return range(0, mesh.count(IN_STAGE), mesh.tensor)


def num_reported(num_microbatches: int, num_trainable: int) -> int:
    """The number of numbers that a rank adds to ``report``."""
    return 1 + num_microbatches + -(-num_trainable // BITS) + MARKS
