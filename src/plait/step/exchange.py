"""The agreements of the ranks before a step's first forward and after its last backward (see ``table.agreement``)."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.agree import Rows
from plait.comm.texts import differences
from plait.forward.batch import batch_tensors
from plait.table.agreement import AGREEING, BITS, COUNTS, IN_STAGE, counted
from plait.table.collectives import Note
from plait.zero.state.identity import some_elements

_SAMPLES = (1 << 32) - 1
"""The bits of the number of samples; the bits above them are a digest of the samples."""


class Report(NamedTuple):
    """The numbers that all ranks know before the update."""

    squares: float
    """The global sum of the gradients' squares."""
    losses: list[list[float]]
    """The losses of the microbatches: a row for each data rank and part of the time."""
    have_gradient: dict[str, bool]
    """True for each parameter that has a gradient on any rank."""
    marks: list[list[float]]
    """The other numbers that each rank reported, by rank."""


class Exchange:
    """Small agreements among the ranks.

    Args:
        names: the trainable parameters of the whole model, in one order on all ranks.
        losses_at: the pipe coordinate of the last stage.
    """

    def __init__(self, comm: Comm, names: Sequence[str], losses_at: int = 0) -> None:
        self.comm, self.names = comm, list(names)
        self.ranks, self.tensor = comm.mesh.count(AGREEING), comm.mesh.tensor
        self.in_stage, self.counted = comm.mesh.count(IN_STAGE), counted(comm.mesh)
        self.losses_at, self.same_samples = losses_at, comm.mesh.size > comm.mesh.data_size
        self._counts = Rows(comm, COUNTS, torch.int64, AGREEING, Note("count"))
        self._reports: dict[int, Rows] = {}  # by their length, which the number of microbatches decides

    def counts(
        self,
        microbatches: int,
        targets: int,
        samples: int,
        frozen: Sequence[str] = (),
        brought: Sequence[Any] = (),
        whole: int | None = None,
    ) -> tuple[int, int]:
        """Returns the global index of this rank's first sample, and the global number of targets.

        Args:
            frozen: the parameters that were frozen since the model was placed.
            brought: the microbatches, which are compared if several ranks work on the same samples.
            whole: the number of the microbatches' targets before they were cut in time.

        Raises:
            ValueError: different numbers of microbatches, different batches in one data rank, or no target anywhere;
                ranks that have frozen different parameters.
        """
        told = ", ".join(frozen) or "none"
        digest = _digest(brought) if self.same_samples else 0
        samples |= digest << 32  # one number: ranks that work on the same samples compare both
        table = self._counts.gather([microbatches, targets, samples, crc32(told.encode())])
        if len({row.pop() for row in table}) > 1:
            fields = {"the parameters frozen since the Engine was built": told}
            reasons = "; ".join(differences(self.comm, fields, Note("count")))
            raise ValueError(
                f"the ranks train different parameters: {reasons}. Freeze and thaw on all of them together"
            )
        if len({row[0] for row in table}) > 1:
            raise ValueError(
                f"ranks bring different numbers of microbatches ({', '.join(str(row[0]) for row in table)}): "
                f"every rank must bring the same number, empty ones included"
            )
        data = [table[rank] for rank in self.counted]
        if any(table[i] != data[i % self.in_stage // self.tensor] for i in range(self.ranks)):
            axes = " or ".join(a for a in ("tensor", "pipe") if self.comm.mesh.axis(a) > 1)
            raise ValueError(
                f"ranks that differ in {axes} only bring different batches: they work on the same samples, so read "
                f"the batch of comm.data_rank"
            )
        context = self.comm.mesh.context
        place = context * self.comm.data_rank
        if any(row[2] != data[i - i % context][2] for i, row in enumerate(data)):
            raise ValueError(
                f"the ranks of a context group bring different batches: all {context} read the same samples, whole in "
                f"time, so read the batch of comm.data_rank"
            )
        if whole is not None and (left := sum(row[1] for row in data[place : place + context])) != whole:
            raise ValueError(
                f"count_fn counts {whole} in the whole microbatches and {left} in what context={context} has cut "
                f"them into: count the targets of the batch, not its samples"
            )
        total = sum(row[1] for row in data)
        if total == 0:
            raise ValueError("there is no target in any rank's microbatches: their counts are all 0")
        return sum(row[2] & _SAMPLES for row in data[:place:context]), total

    def report(self, squares: float, losses: Sequence[float], touched: set[str], marks: Sequence[float]) -> Report:
        """Exchanges the small message before the update.

        Args:
            losses: the losses of this data rank's microbatches; only ranks with the last stage count.
            touched: the parameters that got a gradient on this rank.
            marks: the first gradient that is not finite, the stop signal, the digest of the position (see ``reduce``).

        Raises:
            ValueError: the ranks of a tensor group, which compute the same losses, have different ones.
        """
        bits = [
            float(sum(1 << i for i, name in enumerate(self.names[start : start + BITS]) if name in touched))
            for start in range(0, len(self.names), BITS)
        ]
        numbers = [squares, *losses, *bits, *marks]
        if (size := len(numbers)) not in self._reports:
            self._reports[size] = Rows(self.comm, size, torch.float64, AGREEING, Note("report"))
        rows = self._reports[size].gather(numbers)
        total = 0.0
        for row in rows:
            total += row[0]
        first_bit, last_bit = 1 + len(losses), 1 + len(losses) + len(bits)
        ends = [row[1:first_bit] for row in rows[self.losses_at * self.in_stage :][: self.in_stage]]
        for i in range(0, self.in_stage, self.tensor):
            for same in zip(*ends[i : i + self.tensor], strict=True):
                if max(same) - min(same) > 1e-4 * max(map(abs, same)):
                    raise ValueError(
                        f"the ranks of a tensor group have different losses ({', '.join(f'{x:.6g}' for x in same)}), "
                        f"though they work on the same samples: an output that the tensor plan cuts ('column') reaches "
                        f"the loss without a 'row' or 'gathered' after it"
                    )
        columns = zip(*(row[first_bit:last_bit] for row in rows), strict=True)
        masks = [reduce(or_, map(int, column)) for column in columns]
        have = {name: bool(masks[i // BITS] >> (i % BITS) & 1) for i, name in enumerate(self.names)}
        return Report(total, ends[:: self.tensor], have, [row[last_bit:] for row in rows])


def _digest(microbatches: Sequence[Any]) -> int:
    """Returns 31 bits from some elements of every tensor that is on the host."""
    digest = 0
    for leaf in batch_tensors(list(microbatches)):
        known = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested
        if known and leaf.device.type == "cpu" and leaf.numel():
            few = some_elements(leaf).resolve_conj().resolve_neg().contiguous()
            digest = crc32(few.view(torch.uint8).numpy().data, digest)
    return digest >> 1
