"""The engine: one reduction, one update, and the code around them.

engine.py           ``Engine``: the step, and the calls of a program's own loop                start here
optimizer_hooks.py  reduce before the step of a stock optimizer, publish after it
reduce.py           the work between the last backward and the update: sums, norm, clipping
late.py             ends a step without making the host wait
placed_model.py     the parts of an engine: stages, units, the runs that this rank owns
step.py             a step under way, and its result
exchange.py         the two small messages of a step on which all ranks agree
norm.py             the global norm, in which every element counts once
nonfinite.py        names the rank whose loss or gradient is not finite
reduction.py        turns a mean and its count into a sum
watcher.py          the events of a step, for watchers
metrics.py          sums and rows of all data ranks
batch_norm.py       ``nn.SyncBatchNorm`` over all data ranks
evaluation.py       the loss without a step
ema.py              an average of the weights
gathered.py         whole parameters between steps, read and written
"""

from plait.step.ema import EMA
from plait.step.engine import Engine
from plait.step.evaluation import Evaluation
from plait.step.step import StepResult
from plait.zero.elementwise import elementwise
from plait.zero.state.init import empty_parameters

__all__ = ["EMA", "Engine", "Evaluation", "StepResult", "elementwise", "empty_parameters"]
