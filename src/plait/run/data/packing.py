"""Documents of different lengths, packed into rows of one length.

    documents   a0 a1 a2 a3    b0 b1 b2    c0 c1 c2 c3 c4 c5 c6 c7                             length 5

    tokens      c0 c1 c2 c3 c4 | a0 a1 a2  c5 c6 | b0 b1  .  .  .      a document's last token is a target only
    targets     c1 c2 c3 c4 c5 | a1 a2 a3  c6 c7 | b1 b2  -  -  -      -  no loss
    documents    0  0  0  0  0 |  0  0  0   1  1 |  0  0  1  1  1      the unused rest is its own document

A document longer than a row is cut into pieces, each of which is then a document.  The token after a piece is still the
target of its last token, so each pair of neighbours within a document is trained on once per epoch, and no other pair.

Pieces are placed once, from the longest to the shortest, each in the row with the least space that it fits ("best fit
decreasing": on many pieces, at most 11/9 of the fewest rows possible, Johnson 1973; for language models, Ding et al.,
arXiv:2404.10830).  Each epoch goes through the rows in its own order.  Documents of a row do not see each other, so new
neighbours would gain nothing, and this way the number of steps is known beforehand.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from plait.run.data.batches import IGNORED, Batch
from plait.run.data.corpus import Corpus
from plait.run.data.windows import as_tokens, keep_first_part


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Packs indices into ``sizes`` (1 to ``length``) in rows with sums of at most ``length``, in O(n log n)."""
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of by_space, ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(spaces, sizes[index])
        if at == len(spaces):
            space, row = length, len(rows)
            rows.append([])
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[row].append(index)
        if left := space - sizes[index]:
            if left not in by_space:
                insort(spaces, left)
            by_space.setdefault(left, []).append(row)
    return rows


class PackedBatches(Corpus):
    """Packed rows: int64 ``tokens``, ``targets`` and ``documents``, all [count, length].

    ``documents`` numbers the documents of a row from 0; a model's attention must not cross them, and positions start
    again in each (see ``models.documents``).  Documents are bytes, each a token, or rows of whole numbers.  Those with
    fewer than 2 tokens have nothing to predict, and are left out.  ``ragged`` is the same as in ``TextBatches``.
    """

    def __init__(self, documents: Iterable[bytes | Tensor], length: int, seed: int, ragged: bool = False) -> None:
        rows = [as_tokens(document) for document in documents]
        kept = [row for row in rows if len(row) > 1]
        self._tokens = torch.cat(kept)
        pieces = [
            (begin + first, min(length, len(row) - 1 - first))
            for row, begin in zip(kept, accumulate(map(len, kept), initial=0), strict=False)
            for first in range(0, len(row) - 1, length)
        ]
        packed = best_fit([size for _, size in pieces], length)
        self._pieces = torch.tensor([pieces[i] for row in packed for i in row])
        self._rows = torch.tensor([0, *(len(row) for row in packed)]).cumsum(0)  # first piece of each row
        self.length, self.seed, self.ragged = length, seed, ragged

    @property
    def num_samples(self) -> int:
        return len(self._rows) - 1

    def blank(self) -> Batch:
        tokens_T = torch.zeros(self.length, dtype=torch.int64)
        return {"tokens": tokens_T, "targets": torch.full_like(tokens_T, IGNORED), "documents": tokens_T.clone()}

    def sample(self, number: int, entry: int) -> Batch:
        row = self.blank()
        first, stop = self._rows[number : number + 2].tolist()
        row["documents"].fill_(stop - first)
        here = slice(0, 0)
        for document, (start, size) in enumerate(self._pieces[first:stop].tolist()):
            here = slice(here.stop, here.stop + size)
            row["tokens"][here] = self._tokens[start : start + size]
            row["targets"][here] = self._tokens[start + 1 : start + size + 1]
            row["documents"][here] = document
        if self.ragged:
            keep_first_part(row["targets"], self.seed, entry)
        return row
