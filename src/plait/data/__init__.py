"""Data in which a sample is a function of (seed, place in the run), so that any layout reads the same run."""

from plait.data.batches import Batch, Batches, split_samples
from plait.data.corpus import Corpus, Epochs
from plait.data.order import sample_at
from plait.data.packing import PackedBatches
from plait.data.regression import SyntheticRegression
from plait.data.text import load_documents, load_text, split_documents, split_text
from plait.data.windows import TextBatches, as_tokens
from plait.data.workers import StepDataset, StepStream

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "Epochs",
    "PackedBatches",
    "StepDataset",
    "StepStream",
    "SyntheticRegression",
    "TextBatches",
    "as_tokens",
    "load_documents",
    "load_text",
    "sample_at",
    "split_documents",
    "split_samples",
    "split_text",
]
