"""A finite set of samples, epoch after epoch: the order of an epoch, and the ends of its steps.

    entry of the run     0  1  2  3  4  5  6 | 7  8  9 ...      7 samples: entry e is place e % 7 of epoch e // 7
    sample               3  0  6  1  5  2  4 | 2  5  0 ...      each epoch in its own order
    steps of 3          [0  1  2][3  4  5][6   7  8][9 ...      a corpus used directly: steps cross the epochs
    Epochs              [0  1  2][3  4  5][6]|[7  8  9][...     the last step of an epoch has the remaining samples

Both are functions of the step's number, so every rank knows them without communication.

The last step of an epoch may have fewer samples than parts (data ranks x microbatches).  Every rank must still run
every part, because the others wait for its messages, and many models cannot run on 0 samples: a part without samples
gets a blank one, which has no loss.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from plait.run.data.batches import Batch, Batches
from plait.run.data.order import sample_at


class Corpus(Batches):
    """Samples by number.  A new corpus sets ``seed`` and implements ``num_samples``, ``sample`` and ``blank``."""

    seed: int
    vocabulary: int | None = None
    """The number of tokens that the model knows; None: it reads none, or any."""
    _tokens: Any
    """All tokens, in a row that can be sliced."""

    def check_tokens(self, most: int) -> None:
        """Raises ValueError for one of the first ``most`` tokens that the model does not know."""
        self._check(self._tokens[:most].long())

    def _check(self, tokens: Tensor) -> None:
        largest = int(tokens.max()) if tokens.numel() and self.vocabulary is not None else 0
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ValueError(
                f"the data has token {largest}, but the model's vocabulary ends at {self.vocabulary - 1}: give "
                f"--vocab {largest + 1} or more, or the data of this model's tokenizer"
            )

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of one epoch, at least 1."""

    @abstractmethod
    def sample(self, number: int, entry: int) -> Batch:
        """Sample ``number``, its tensors without a batch dim.  ``entry``, its place in the run, seeds random draws."""

    @abstractmethod
    def blank(self) -> Batch:
        """A sample without a loss, its tensors without a batch dim."""

    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        return self.entries(step * global_batch + first, count)

    def entries(self, first: int, count: int, *, shuffled: bool = True) -> Batch:
        """Entries first .. first + count - 1 of the run, every tensor with a first dim of ``count``."""
        rows = []
        for entry in range(first, first + max(count, 1)):
            epoch, index = divmod(entry, self.num_samples)
            number = sample_at(self.seed, epoch, index, self.num_samples) if shuffled else index
            rows.append(self.sample(number, entry))
        batch = {name: torch.stack([row[name] for row in rows])[:count] for name in rows[0]}
        for name in ("tokens", "targets"):
            self._check(batch.get(name, torch.empty(0)))
        return batch


class Epochs(Batches):
    """The steps of a corpus, which end with each epoch.  If not ``shuffled``, samples are in the order of numbers."""

    def __init__(self, corpus: Corpus, *, shuffled: bool = True) -> None:
        self.corpus, self.shuffled = corpus, shuffled

    def num_steps(self, global_batch: int) -> int:
        """Steps of one epoch, each sample in exactly one."""
        return -(-self.corpus.num_samples // global_batch)

    def size(self, step: int, global_batch: int) -> int:
        place = step % self.num_steps(global_batch)
        return min(global_batch, self.corpus.num_samples - place * global_batch)

    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        epoch, place = divmod(step, self.num_steps(global_batch))
        entry = epoch * self.corpus.num_samples + place * global_batch + first
        return self.corpus.entries(entry, count, shuffled=self.shuffled)

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, global_batch: int
    ) -> list[Batch]:
        """See ``Batches.microbatches``.  A microbatch without samples is one blank sample."""
        mine = super().microbatches(step, data_rank, num_data_ranks, num_microbatches, global_batch)
        blank = {name: tensor[None] for name, tensor in self.corpus.blank().items()}
        return [batch if len(next(iter(batch.values()))) else blank for batch in mine]
