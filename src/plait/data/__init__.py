"""Data in which a sample is a function of (seed, place in the run), so that any layout reads the same run."""

from plait.data.batches import Batch, Batches, TextBatches, split_samples
from plait.data.order import sample_at
from plait.data.regression import SyntheticRegression
from plait.data.text import load_text, split_text

__all__ = [
    "Batch",
    "Batches",
    "SyntheticRegression",
    "TextBatches",
    "load_text",
    "sample_at",
    "split_samples",
    "split_text",
]
