"""Makes the data of a job from a config: the training part, the held-out part, and the number of steps.

windows of a text    (TextBatches)      or its documents, packed (--pack, PackedBatches)
--steps              steps continue from epoch to epoch
--epochs             steps end with the epoch: the last step has the remaining samples
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.run.data import Batches, Corpus, Epochs, PackedBatches, TextBatches
from plait.run.data.text import load_documents, load_text, split_documents, split_text
from plait.run.data.tokens import load_tokens, token_files
from plait.run.job.config import JobConfig

LOOKED_AT = 1 << 24
"""Number of tokens that are checked against the vocabulary before a run.  Later tokens are checked batch by batch."""


@dataclass(frozen=True)
class JobData:
    """The data of a run.  ``held_out`` is never trained on (None: there is none).  ``steps`` is for the whole run."""

    batches: Batches
    held_out: Epochs | None
    steps: int
    digest: Callable[[], str | None] = lambda: None
    """Identifies the text, or the batches of a user's job, to detect a change.  None: the settings decide the data."""


def digest_of(values: Iterable[bytes | Tensor]) -> str:
    """Hashes all bytes in order, with the dtype and shape of each value."""
    digest = hashlib.sha256()
    for value in values:
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8) if isinstance(value, bytes) else value
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def make_data(config: JobConfig) -> JobData:
    """Makes the data that a config describes.

    Raises:
        ValueError: a text that is missing or too short, a step that asks for more samples than there are, or a
            warmup that is longer than the epochs.
    """
    if config.family.batches is not None:
        batches = config.family.batches(config.sizes, config.seed, config.ragged, config.torch_dtype)

        def first_batch() -> str:
            whole = batches.samples(0, 0, size := batches.size(0, config.batch), size)
            return digest_of(leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor))

        return JobData(batches, None, config.steps, first_batch if config.job is not None else lambda: None)
    length, seed, vocabulary = config.length, config.seed, getattr(config.sizes, "vocabulary", None)
    corpus: Corpus
    rest: Corpus
    if shards := token_files(config.data):
        if config.pack:
            raise ValueError("pack is for text, which has documents; files of tokens have none: leave it out")
        row, row_end = split_text(load_tokens(shards, vocabulary or 1), length)
        corpus, rest = TextBatches(row, length, seed, ragged=config.ragged), TextBatches(row_end, length, seed)
        digest = cache(lambda: digest_of(part for half in (row, row_end) for part in half.sampled()))
    elif config.pack:
        encode = config.family.encoder(config.sizes)
        documents, last = parts = split_documents([encode(document) for document in load_documents(config.data)])
        corpus, rest = PackedBatches(documents, length, seed, ragged=config.ragged), PackedBatches(last, length, seed)
        digest = cache(partial(digest_of, [document for part in parts for document in part]))
    else:
        text, end = split_text(config.family.encoder(config.sizes)(load_text(config.data)), length)
        corpus, rest = TextBatches(text, length, seed, ragged=config.ragged), TextBatches(end, length, seed)
        digest = cache(partial(digest_of, (text, end)))
    for part in (corpus, rest):
        part.vocabulary = vocabulary
        part.check_tokens(LOOKED_AT)
    held_out = Epochs(rest, shuffled=False)
    if config.epochs is not None:
        epochs = Epochs(corpus)
        steps = config.epochs * epochs.num_steps(config.batch)
        if config.warmup > steps:
            raise ValueError(
                f"a warmup of {config.warmup} steps, but {config.epochs} epochs of {corpus.num_samples} samples are "
                f"{steps} steps of {config.batch}: give a warmup of at most {steps}, or more epochs"
            )
        return JobData(epochs, held_out, steps, digest)
    if config.batch > corpus.num_samples:
        raise ValueError(
            f"a batch of {config.batch} samples, but the data has {corpus.num_samples} of length {config.length}: "
            f"give batch <= {corpus.num_samples}, a shorter length, more data, or epochs instead of steps"
        )
    return JobData(corpus, held_out, config.steps, digest)
