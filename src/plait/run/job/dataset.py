"""The data of a job, from a config: what is trained on, what is held out, and how many steps that makes.

windows of a text    (TextBatches)      or its documents, packed (--pack, PackedBatches)
--steps              steps run on from epoch to epoch
--epochs             steps end with the epoch: the last has the samples that are left
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
"""Tokens that are held against the vocabulary before a run; of those that follow, each batch is."""


@dataclass(frozen=True)
class JobData:
    """What a run reads: ``held_out`` is never trained on (None: there is none), ``steps`` are the whole run's."""

    batches: Batches
    held_out: Epochs | None
    steps: int
    digest: Callable[[], str | None] = lambda: None
    """By which another text, or other batches of a user's job, are told; None: the settings decide the data."""


def digest_of(values: Iterable[bytes | Tensor]) -> str:
    """Of all bytes, in order, and where each value ends."""
    digest = hashlib.sha256()
    for value in values:
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8) if isinstance(value, bytes) else value
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def make_data(config: JobConfig) -> JobData:
    """The data that a config describes.

    Raises:
        ValueError: a text that is missing or too short, a step that asks for more samples than there are, or a
            warmup that the epochs are too short for.
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
