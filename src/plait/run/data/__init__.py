"""Data whose samples are functions of (seed, place in the run), so that any layout reads the same run.

order.py         the order of the samples, as a function                  start here
batches.py       a rank's microbatches of a step, from its place in the run
corpus.py        a finite set of samples, and the ends of the steps in an epoch
text.py          text as bytes, and its held-out part
tokens.py        files of token numbers, mapped into memory
windows.py       a text as windows of equal length
packing.py       documents of different lengths in rows of one length
regression.py    regression data from a hash
rank_batches.py  a rank's part of each batch, for a stock DataLoader
workers.py       makes the batches of the next steps ahead, in worker processes
"""

from plait.run.data.batches import Batch, Batches, on_device, split_samples
from plait.run.data.corpus import Corpus, Epochs
from plait.run.data.order import sample_at
from plait.run.data.packing import PackedBatches
from plait.run.data.rank_batches import RankBatches
from plait.run.data.regression import SyntheticRegression
from plait.run.data.text import load_documents, load_text, split_documents, split_text
from plait.run.data.windows import TextBatches, as_tokens
from plait.run.data.workers import StepDataset, StepStream

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "Epochs",
    "PackedBatches",
    "RankBatches",
    "StepDataset",
    "StepStream",
    "SyntheticRegression",
    "TextBatches",
    "as_tokens",
    "load_documents",
    "load_text",
    "on_device",
    "sample_at",
    "split_documents",
    "split_samples",
    "split_text",
]
