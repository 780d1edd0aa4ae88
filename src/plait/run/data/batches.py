"""Batches as functions of their place in the run.

Sample i of step s is entry s * global_batch + i of the run.  A rank, or the one-process reference, asks for any slice
and gets the same bits; no iterator has a state that could drift, and only the step must be saved.  A global batch of 8
on 2 data ranks with 2 microbatches each:

    sample              0 1 | 2 3 | 4 5 | 6 7
    global microbatch    0  |  1  |  2  |  3         = data_rank * num_microbatches + m
    data rank               0     |     1

A batch that does not divide is cut unevenly (``split_samples``); since losses are sums, nothing else depends on it.
A step may be smaller than the others (``size``), and have fewer samples than parts (see ``corpus``).
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from plait.torch_private import tree_map

IGNORED = -100  # the target of a position without a loss (the default of ``torch.nn.functional.cross_entropy``)
Batch = dict[str, Tensor]


def split_samples(global_batch: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """(first, count) of each part: contiguous, in order, sizes differing by at most one, larger ones first."""
    size, larger = divmod(global_batch, num_parts)
    return tuple((part * size + min(part, larger), size + (part < larger)) for part in range(num_parts))


def on_device(batches: list[Any], device: str) -> list[Any]:
    """Moves every tensor of nested batches to a device."""
    return [tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch) for batch in batches]


class Batches(ABC):
    """A source of batches.  A new one implements ``samples``; all are cut into microbatches in the same way."""

    @abstractmethod
    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        """Samples first .. first + count - 1 of a step of ``global_batch``: the same bits for any cut."""

    def size(self, step: int, global_batch: int) -> int:
        """Samples of a step: ``global_batch``, unless the source ends steps earlier (see ``Epochs``)."""
        return global_batch

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, global_batch: int
    ) -> list[Batch]:
        """The step's microbatches of one data rank: global microbatches data_rank * num_microbatches + m.  ValueError
        for fewer samples than microbatches over all data ranks."""
        num_parts = num_data_ranks * num_microbatches
        if global_batch < num_parts:
            raise ValueError(
                f"a global batch of {global_batch} samples cannot fill {num_data_ranks} data ranks "
                f"x {num_microbatches} microbatches: raise global_batch to {num_parts} or use fewer"
            )
        parts = split_samples(self.size(step, global_batch), num_parts)
        mine = parts[data_rank * num_microbatches :][:num_microbatches]
        return [self.samples(step, first, count, global_batch) for first, count in mine]
