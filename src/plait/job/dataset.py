"""The data of a job, from a config: what is trained on, what is held out, and how many steps that makes.

windows of a text    (TextBatches)      or its documents, packed (--pack, PackedBatches)
--steps              steps run on from epoch to epoch
--epochs             steps end with the epoch: the last has the samples that are left
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from plait.data import Batches, Corpus, Epochs, PackedBatches, TextBatches
from plait.data.text import load_documents, load_text, split_documents, split_text
from plait.job.config import JobConfig


@dataclass(frozen=True)
class JobData:
    """What a run reads."""

    batches: Batches
    held_out: Epochs | None
    """What is never trained on; None: there is no such part."""
    steps: int
    """Of the whole run."""


def make_data(config: JobConfig) -> JobData:
    """The data that a config describes.

    Raises:
        ValueError: a text that is missing or too short, a step that asks for more samples than there are, or a
            warmup that the epochs are too short for.
    """
    if config.family.batches is not None:
        batches = config.family.batches(config.sizes, config.seed, config.ragged, config.torch_dtype)
        return JobData(batches, None, config.steps)
    corpus, rest = _corpora(config, config.family.encoder(config.sizes))
    held_out = Epochs(rest, shuffled=False)
    if config.epochs is not None:
        epochs = Epochs(corpus)
        steps = config.epochs * epochs.num_steps(config.batch)
        if config.warmup > steps:
            raise ValueError(
                f"a warmup of {config.warmup} steps, but {config.epochs} epochs of {corpus.num_samples} samples are "
                f"{steps} steps of {config.batch}: give a warmup of at most {steps}, or more epochs"
            )
        return JobData(epochs, held_out, steps)
    if config.batch > corpus.num_samples:
        raise ValueError(
            f"a batch of {config.batch} samples, but the data has {corpus.num_samples} of length {config.length}: "
            f"give batch <= {corpus.num_samples}, a shorter length, more data, or epochs instead of steps"
        )
    return JobData(corpus, held_out, config.steps)


def _corpora(config: JobConfig, encode: Callable[[bytes], Tensor]) -> tuple[Corpus, Corpus]:
    """What is trained on, and what is held out."""
    length, seed = config.length, config.seed
    if config.pack:
        documents, held_out = split_documents([encode(document) for document in load_documents(config.data)])
        return PackedBatches(documents, length, seed, ragged=config.ragged), PackedBatches(held_out, length, seed)
    text, rest = split_text(encode(load_text(config.data)), length)
    return TextBatches(text, length, seed, ragged=config.ragged), TextBatches(rest, length, seed)
