"""plait trains one PyTorch model over many ranks and proves that the result is the run of a single process.

core     the table, the flat layout, the order of additions: pure, start with ``core/cells.py``
plan     what a layout will send and hold, before it runs
comm     ranks as processes or threads, and the ledger of what they send
tensor   tensors cut over named axes; tensor and sequence parallelism
engine   units with flat storage, gradients, the optimizer's pieces, the step
verify   the proof
train    the run
naive    the first version of what is fast elsewhere, to learn from
"""

from plait.api import join, run_threads, sum_of_mean
from plait.comm import Comm
from plait.core.cells import TABLE, Cell, Strategy, parse_strategy
from plait.core.layout import Layout
from plait.core.mesh import Mesh
from plait.core.precision import LossScale
from plait.engine import Engine, Evaluation, StepResult, empty_parameters
from plait.tensor import (
    LayoutError,
    ShardedTensor,
    annotate,
    auto_redistribute,
    dropout_stream,
    explain,
    from_dtensor,
    to_dtensor,
)
from plait.tensor.parallel import cross_entropy_sum

__version__ = "0.1.0"

__all__ = [
    "TABLE",
    "Cell",
    "Comm",
    "Engine",
    "Evaluation",
    "Layout",
    "LayoutError",
    "LossScale",
    "Mesh",
    "ShardedTensor",
    "StepResult",
    "Strategy",
    "annotate",
    "auto_redistribute",
    "cross_entropy_sum",
    "dropout_stream",
    "empty_parameters",
    "explain",
    "from_dtensor",
    "join",
    "parse_strategy",
    "run_threads",
    "sum_of_mean",
    "to_dtensor",
]
