"""A text as windows of equal length: sample i is tokens i * length .. (i + 1) * length.

    text       t0 t1 t2 t3 t4 t5 t6 t7 t8 ...      length 4
    sample 0   t0 t1 t2 t3       targets t1 t2 t3 t4
    sample 1               t4 t5 t6 t7   targets t5 t6 t7 t8

Windows know nothing of documents; ``PackedBatches`` does.
"""

import torch
from torch import Tensor

from plait.run.data.batches import IGNORED, Batch
from plait.run.data.corpus import Corpus
from plait.run.data.order import mix
from plait.run.data.tokens import Tokens

_LENGTHS = 0x1E46  # keeps the hash that draws lengths apart from the one that draws the order


def as_tokens(text: bytes | Tensor) -> Tensor:
    """Makes a row of tokens, one for each byte; a tensor already is one."""
    if isinstance(text, Tensor):
        return text
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def keep_first_part(targets_T: Tensor, seed: int, entry: int) -> None:
    """Ignores, in place, all targets but the first few: 1 to T of them, drawn from (seed, place in the run)."""
    targets_T[1 + mix(seed, _LENGTHS, entry) % len(targets_T) :] = IGNORED


class TextBatches(Corpus):
    """Windows of a text: ``tokens`` and ``targets`` (the tokens one further on), int64 [count, length].

    ``ragged`` keeps the loss on a first part of each sample only, 1 to ``length`` targets, drawn from (seed, place in
    the run); the rest are ``IGNORED``.  It makes token counts differ, as padding does in real data.
    """

    def __init__(self, tokens: bytes | Tensor | Tokens, length: int, seed: int, ragged: bool = False) -> None:
        self._tokens = tokens if isinstance(tokens, Tokens) else as_tokens(tokens)
        self.length, self.seed, self.ragged = length, seed, ragged

    @property
    def num_samples(self) -> int:
        return (len(self._tokens) - 1) // self.length

    def blank(self) -> Batch:
        tokens_T = torch.zeros(self.length, dtype=torch.int64)
        return {"tokens": tokens_T, "targets": torch.full_like(tokens_T, IGNORED)}

    def sample(self, number: int, entry: int) -> Batch:
        window = self._tokens[number * self.length : (number + 1) * self.length + 1].long()
        targets_T = window[1:].clone()
        if self.ragged:
            keep_first_part(targets_T, self.seed, entry)
        return {"tokens": window[:-1], "targets": targets_T}
