"""Makes the data of a job from a config: the training part, the held-out part, and the number of steps.

windows of a text    (TextBatches)      or its documents, packed (--pack, PackedBatches)
--steps              steps continue from epoch to epoch
--epochs             steps end with the epoch: the last step has the remaining samples
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from plait.run.data.batches import Batches
from plait.run.data.corpus import Epochs
from plait.run.data.packing import PackedBatches
from plait.run.data.text import load_documents, load_text, split_documents, split_text
from plait.run.data.tokens import load_tokens, token_files
from plait.run.data.windows import TextBatches
from plait.run.job.config import JobConfig
from plait.torch_private import tree_leaves

LOOKED_AT = 1 << 24
"""The number of tokens checked against the vocabulary before a run.  Later tokens are checked batch by batch."""


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


def make_data(config: JobConfig, dtype: torch.dtype = torch.float32) -> JobData:
    """Makes the data that a config describes; values other than tokens have the dtype.  ValueError if the text is
    missing or too short, a step needs more samples than there are, or the warmup is longer than the epochs."""
    if config.family.batches is not None:
        batches = config.family.batches(config.sizes, config.samples.seed, config.samples.ragged, dtype)

        def first_batch() -> str:
            whole = batches.samples(0, 0, size := batches.size(0, config.samples.batch), size)
            return digest_of(leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor))

        digest = JobData.digest if config.network.job is None else first_batch
        return JobData(batches, None, config.samples.steps, digest)
    samples, length, vocabulary = config.samples, config.network.length, getattr(config.sizes, "vocabulary", None)
    halves: Any
    hashed: Iterable[Any]
    if shards := token_files(samples.data):
        if samples.pack:
            raise ValueError("pack is for text, which has documents; files of tokens have none: leave it out")
        halves = split_text(load_tokens(shards, vocabulary or 1), length)
        hashed = (part for half in halves for part in half.sampled())
    elif samples.pack:
        encode = config.family.encoder(config.sizes)
        halves = split_documents([encode(document) for document in load_documents(samples.data)])
        hashed = (document for half in halves for document in half)
    else:
        hashed = halves = split_text(config.family.encoder(config.sizes)(load_text(samples.data)), length)
    digest, kind = cache(partial(digest_of, hashed)), PackedBatches if samples.pack else TextBatches
    corpus, rest = kind(halves[0], length, samples.seed, samples.ragged), kind(halves[1], length, samples.seed)
    for part in (corpus, rest):
        part.vocabulary = vocabulary
        part.check_tokens(LOOKED_AT)
    held_out = Epochs(rest, shuffled=False)
    if samples.epochs is not None:
        epochs = Epochs(corpus)
        steps = samples.epochs * epochs.num_steps(samples.batch)
        if config.update.warmup > steps:
            raise ValueError(
                f"a warmup of {config.update.warmup} steps, but {samples.epochs} epochs of {corpus.num_samples} "
                f"samples are {steps} steps of {samples.batch}: give a warmup of at most {steps}, or more epochs"
            )
        return JobData(epochs, held_out, steps, digest)
    if samples.batch > corpus.num_samples:
        raise ValueError(
            f"a batch of {samples.batch} samples, but the data has {corpus.num_samples} of length {length}: "
            f"give batch <= {corpus.num_samples}, a shorter length, more data, or epochs instead of steps"
        )
    return JobData(corpus, held_out, samples.steps, digest)
