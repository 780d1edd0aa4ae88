"""Batches for a stock DataLoader: this data rank's part of each global batch, with every sample once in an epoch.

    10 samples in batches of 4, 2 data ranks    rank 0    0 1    4 5    8     a batch of fewer samples at the end
                                                rank 1    2 3    6 7    9
     9 samples                                  rank 0    0 1    4 5 6        1 sample is too few for 2 ranks, so the
                                                rank 1    2 3    7 8          batch before takes it too

torch's DistributedSampler lets ranks repeat samples, or leaves some out, if they do not divide.  Here no sample counts
twice, and each rank has a batch if another has one: ranks with more samples weigh more, as in the engine.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from plait.table.mesh import Mesh


class RankBatches(Sampler[list[int]]):
    """The indices of this rank's samples, batch by batch: ``DataLoader(dataset, batch_sampler=...)``.

    Ranks that differ only along pipe and tensor have the same batches.  The order is the same as in torch's
    DistributedSampler: with one seed a single process has the same global batches.  ValueError for fewer samples in a
    batch, or in the data set, than data ranks.

    Args:
        size: samples of the data set.
        batch_size: samples of a *global* batch, of all data ranks together.
        shuffle: draw a new order for each epoch (see ``set_epoch``).
        drop_last: leave out the samples that do not fill a batch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        mesh: Mesh,
        rank: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.ranks, self.index = mesh.data_size, mesh.data_rank(rank)
        if batch_size < self.ranks or size < (batch_size if drop_last else self.ranks):
            raise ValueError(
                f"{size} samples in batches of {batch_size} (of all ranks together) for {self.ranks} data ranks: each "
                f"rank needs a sample of each batch"
            )
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.epoch = self.start = 0
        full, rest = divmod(size, batch_size)
        self.ends = [batch_size * (number + 1) for number in range(full)]
        """The end of each global batch."""
        if rest and not drop_last:
            if rest < self.ranks:
                self.ends.pop()
            self.ends.append(size)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Sets the epoch's order; call it before each epoch.  Skips the first ``start`` batches, already trained on.

        That number is the whole cursor of a resumed run: it is the same on every rank, and batches that workers had
        read ahead are read again.  Save it with the epoch; torch's iterators would count the batches already read.
        Another mesh has the same batches, unless the last has fewer samples than data ranks and is joined to another.
        """
        if not 0 <= start <= len(self.ends):
            raise ValueError(f"start={start}: an epoch has {len(self.ends)} batches")
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return len(self.ends) - self.start

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
        for start, end in list(zip([0, *self.ends], self.ends, strict=False))[self.start :]:
            here, more = divmod(end - start, self.ranks)
            first = start + self.index * here + min(self.index, more)
            yield order[first : first + here + (self.index < more)]
