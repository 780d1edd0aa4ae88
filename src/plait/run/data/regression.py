"""Regression data from a hash: element j of sample i is a function of (seed, i, j) alone.

The hash is integer arithmetic, and later operations round once each, so the bits depend neither on the cut of the batch
nor on vector widths, threads or the machine.  A generator would have to be seeded per sample, and torch's CPU generator
keeps only 32 bits of its seed.
"""

import torch
from torch import Tensor

from plait.run.data.batches import Batch, Batches
from plait.run.data.order import GOLDEN, MULTIPLIERS, mix

_INPUTS, _MASK = 0x1290, 0x3A5C  # keep the two uses of the hash apart


def _signed(word: int) -> int:
    """The 64-bit word as the int64 with the same bits."""
    return (word & (1 << 64) - 1) - (word >> 63 << 64)


def _shift(word: Tensor, places: int) -> Tensor:
    """Shifts to the right and fills with zeros (``>>`` of int64 fills with the sign)."""
    return (word >> places) & ((1 << 64 - places) - 1)


def scramble_tensor(word: Tensor) -> Tensor:
    """``order.scramble`` on int64 elements, bit for bit."""
    word = (word ^ _shift(word, 30)) * _signed(MULTIPLIERS[0])
    word = (word ^ _shift(word, 27)) * _signed(MULTIPLIERS[1])
    return word ^ _shift(word, 31)


class SyntheticRegression(Batches):
    """``x`` and ``y`` [count, width] and ``mask`` [count] of 0 and 1, all of ``dtype``.

    x is uniform with mean 0 and variance 1.  y is a fixed function of x's row, with products of neighbours, so there is
    something to learn.  ``ragged`` clears the mask of a quarter of the rows, at random, but never that of a step's
    first row.  Every dtype sees the same numbers, rounded once.
    """

    def __init__(self, width: int, seed: int, ragged: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self.width, self.seed, self.ragged, self.dtype = width, seed, ragged, dtype

    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        begin = step * global_batch
        entries = range(begin + first, begin + first + count)
        keys_B = [_signed(mix(self.seed, _INPUTS, entry)) for entry in entries]
        element_D = torch.arange(1, self.width + 1) * _signed(GOLDEN)
        word_BD = scramble_tensor(torch.tensor(keys_B, dtype=torch.int64)[:, None] + element_D)
        uniform_BD = _shift(word_BD, 11).to(torch.float64) * 2.0**-53
        x_BD = (uniform_BD - 0.5) * 12.0**0.5
        y_BD = x_BD * (x_BD.roll(-1, 1) + 0.5)
        kept = [not self.ragged or entry == begin or mix(self.seed, _MASK, entry) % 4 > 0 for entry in entries]
        mask_B = torch.tensor(kept, dtype=torch.bool)
        return {"x": x_BD.to(self.dtype), "y": y_BD.to(self.dtype), "mask": mask_B.to(self.dtype)}
