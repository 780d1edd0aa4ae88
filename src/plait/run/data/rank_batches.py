"""Batches for a stock DataLoader: this data rank's part of each global batch, with every sample once in an epoch.

    10 samples in batches of 4, 2 data ranks    rank 0    0 1    4 5    8     a batch of fewer samples at the end
                                                rank 1    2 3    6 7    9
     9 samples                                  the last batch, of 1 sample, is too small for 2 ranks: refused

torch's DistributedSampler lets ranks repeat samples, or leaves some out, if they do not divide.  Here no sample counts
twice, and no batch depends on the mesh: ranks with more samples weigh more, as in the engine.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from plait.comm import Comm
from plait.comm.texts import differences
from plait.run.data.batches import split_samples
from plait.table.collectives import Note
from plait.table.mesh import Mesh


def check_alike(comm: Comm, **fields: object) -> None:
    """Raises ValueError on all ranks if they would deal different orders of samples."""
    if lines := differences(comm, {name: str(value) for name, value in fields.items()}, Note("data")):
        raise ValueError(f"the ranks deal samples differently: {'; '.join(lines)}. Give all ranks the same")


class RankBatches(Sampler[list[int]]):
    """The indices of this rank's samples, batch by batch: ``DataLoader(dataset, batch_sampler=...)``.

    ``batch_size`` counts samples of all data ranks together.  Ranks that differ only along pipe and tensor have the
    same batches.  The order is that of torch's DistributedSampler: with one seed a single process has the same global
    batches.  ValueError for fewer samples in a batch than data ranks, the last included.
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
        rest = 0 if drop_last else size % max(batch_size, 1)
        self.ends = [*range(batch_size, size + 1, batch_size or 1), *[size] * bool(rest)]
        """The end of each global batch."""
        if (last := (rest or batch_size) if self.ends else 0) < self.ranks:
            raise ValueError(
                f"{size} samples in batches of {batch_size} (of all ranks together) end with a batch of {last}, for "
                f"{self.ranks} data ranks: each rank needs a sample of each batch. Give another batch_size, or "
                f"drop_last=True, which leaves out a last batch of fewer samples"
            )
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Sets the epoch's order; call it before each epoch.  Skips the first ``start`` batches, trained on before: the
        cursor of a resumed run, the same on every rank and mesh.  Save it with the epoch; torch's iterators would count
        the batches that workers have read ahead.
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
            first, count = split_samples(end - start, self.ranks)[self.index]
            yield order[start + first : start + first + count]
