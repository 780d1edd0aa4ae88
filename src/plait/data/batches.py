"""Batches as functions of their place in the run.

Sample i of step s is entry s * global_batch + i of the run, whoever asks.  A rank, or the one-process
reference, asks for any slice and gets the same bits; there is no iterator whose state could drift, and
nothing to save but the step.  How a global batch of 8 falls on 2 data ranks with 2 microbatches each:

    sample              0 1 | 2 3 | 4 5 | 6 7
    global microbatch    0  |  1  |  2  |  3         = data_rank * num_microbatches + m
    data rank               0     |     1

A batch that does not divide is cut unevenly (``split_samples``); since losses are sums, nothing else cares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from plait.data.order import mix, sample_at

IGNORED = -100
"""The target of a position that has no loss (the default of ``torch.nn.functional.cross_entropy``)."""

_LENGTHS = 0x1E46
"""Keeps the hash that draws lengths apart from the one that draws the order."""

WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Batch = dict[str, Tensor]


def split_samples(global_batch: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """(first, count) of each part: contiguous, in order, sizes differing by at most one, larger ones first.

    Raises:
        ValueError: fewer samples than parts.
    """
    if num_parts < 1:
        raise ValueError(f"cannot split {global_batch} samples in {num_parts} parts: give at least 1 part")
    if global_batch < num_parts:
        raise ValueError(
            f"{global_batch} samples cannot fill {num_parts} parts: give {num_parts} samples, or fewer parts"
        )
    size, larger = divmod(global_batch, num_parts)
    return tuple((part * size + min(part, larger), size + (part < larger)) for part in range(num_parts))


class Batches(ABC):
    """A source of batches.  A new one writes ``samples``; the cut into microbatches is the same for all."""

    @abstractmethod
    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        """Samples first .. first + count - 1 of a step of ``global_batch``: the same bits for any cut."""

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, global_batch: int
    ) -> list[Batch]:
        """The step's microbatches of one data rank: global microbatches data_rank * num_microbatches + m.

        Raises:
            ValueError: fewer samples than microbatches over all data ranks, or no such data rank.
        """
        if num_data_ranks < 1 or num_microbatches < 1:
            raise ValueError(
                f"{num_data_ranks} data ranks with {num_microbatches} microbatches each: give numbers from 1"
            )
        if not 0 <= data_rank < num_data_ranks:
            raise ValueError(f"data rank {data_rank} of {num_data_ranks}: ranks go from 0 to {num_data_ranks - 1}")
        num_parts = num_data_ranks * num_microbatches
        if global_batch < num_parts:
            raise ValueError(
                f"a global batch of {global_batch} samples cannot fill {num_data_ranks} data ranks "
                f"x {num_microbatches} microbatches: raise global_batch to {num_parts} or use fewer"
            )
        mine = split_samples(global_batch, num_parts)[data_rank * num_microbatches :][:num_microbatches]
        return [self.samples(step, first, count, global_batch) for first, count in mine]


def check_slice(step: int, first: int, count: int, global_batch: int) -> None:
    """Refuse a slice that is not inside its step.

    Raises:
        ValueError: a negative step, or samples outside 0 .. global_batch - 1.
    """
    if step < 0:
        raise ValueError(f"step is {step}: steps count from 0")
    if first < 0 or count < 0 or first + count > global_batch:
        raise ValueError(
            f"samples {first} .. {first + count - 1} are not all in a global batch of {global_batch}: "
            f"first and count must keep within 0 .. {global_batch - 1}"
        )


class TextBatches(Batches):
    """Windows of a text: ``tokens`` and ``targets`` (the tokens one further on), int64 [count, length].

    Sample i of the text is its tokens i * length .. (i + 1) * length; consecutive samples share one token,
    which is the target of the first and the start of the second.  Each epoch goes through all of them in an
    order of its own.

    ``ragged`` keeps the loss on a first part of each sample only, 1 to ``length`` targets, drawn from (seed,
    place in the run); the rest are ``IGNORED``.  It makes token counts differ, as padding does in real data.

    Raises:
        ValueError: a text shorter than one sample, or tokens that are not a row of whole numbers.
    """

    def __init__(self, tokens: bytes | Tensor, length: int, seed: int, ragged: bool = False) -> None:
        if length < 1:
            raise ValueError(f"length is {length}: a sample has at least 1 token")
        if isinstance(tokens, Tensor) and (tokens.dim() != 1 or tokens.dtype not in WHOLE_NUMBERS):
            raise ValueError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}: give one row of whole numbers")
        if len(tokens) < length + 1:
            raise ValueError(
                f"a text of {len(tokens)} tokens is shorter than one sample: length {length} needs "
                f"{length + 1} (the last target too); give more text, or a shorter length"
            )
        if isinstance(tokens, Tensor):
            self._tokens = tokens
        else:
            self._tokens = torch.frombuffer(bytearray(tokens), dtype=torch.uint8)
        self.length = length
        self.seed = seed
        self.ragged = ragged

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return (len(self._tokens) - 1) // self.length

    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        """See ``Batches.samples``: int64 ``tokens`` and ``targets``, both [count, length]."""
        check_slice(step, first, count, global_batch)
        tokens_BT = torch.empty(count, self.length, dtype=torch.int64)
        targets_BT = torch.empty(count, self.length, dtype=torch.int64)
        for row in range(count):
            entry = step * global_batch + first + row
            epoch, index = divmod(entry, self.num_samples)
            start = sample_at(self.seed, epoch, index, self.num_samples) * self.length
            window = self._tokens[start : start + self.length + 1]
            tokens_BT[row] = window[:-1]
            targets_BT[row] = window[1:]
            if self.ragged:
                targets_BT[row, 1 + mix(self.seed, _LENGTHS, entry) % self.length :] = IGNORED
        return {"tokens": tokens_BT, "targets": targets_BT}
