"""The engine: a model's units, the passes of its stages, and the step.

engine.py        ``Engine``: the step                                                      start here
own_loop.py      what a loop of one's own calls: backward, clipping, gathered parameters
placed_model.py  what an engine is built of, and the state that goes in and out
step.py          what a step is while it is under way, and what it did
exchange.py      the two small messages of a step on which all ranks agree
norm.py          the global norm, in which every element counts once
update.py        between the last backward and the update: sums, clip, handing over
host_random.py   the generators of Python and numpy, which a forward may not draw from
nonfinite.py     whose loss or gradient is not finite
reduction.py     a mean and its count as a sum
standing.py      where a rank stands in the run, which must be the same everywhere
drift.py         whether what ranks hold alike still is alike
turns.py         several optimizers make one step
metrics.py       sums and rows of all data ranks
batch_norm.py    ``nn.SyncBatchNorm`` over all data ranks
evaluation.py    the loss without a step
ema.py           an average of the weights
gathered.py      whole parameters beside a step, read and written
"""

from plait.step.ema import EMA
from plait.step.engine import Engine
from plait.step.evaluation import Evaluation
from plait.step.step import StepResult
from plait.zero.probe import elementwise
from plait.zero.state.init import empty_parameters

__all__ = ["EMA", "Engine", "Evaluation", "StepResult", "elementwise", "empty_parameters"]
