"""plait trains one PyTorch model over many ranks and proves that the result is the run of a single process.

core/              the table, the flat layout, the order of additions: pure; start with ``table/cells.py``
schedule/          pipelines as data: actions, orders, passes, the proof, the simulator; pure
files/             what is read from outside, and how results are written
plan/              what a layout will send and hold, before it runs; pure
prove/             the proof of a layout that nobody has run; pure
comm/              worlds: ranks as processes or threads, and the ledger of what they send
sharded/           ``ShardedTensor``: tensors cut over named axes
tensor_parallel/   linear layers, embeddings and losses cut over the tensor axis
engine/            units, the forward, pipeline stages, the step
checkpoint/        models and runs on disk
models/            what the command line trains
data/              what it trains on
job/               what is trained: a model, its loss, data, an optimizer, and their flags
config/            a run as a frozen value, checked before it starts
injection/         faults on purpose
referee/           what is wrong, where, and of what kind
verify/            the proof
witness/           any engine, judged
train/             the run
measure/           what links and machines can do
report/            what a person sees
watch/             what ranks do, told outside of the collectives; who is the cause
launch/            from one command to many ranks
commands/          the ``plait`` command
api.py             the few calls that a script needs besides ``Engine``
"""

TYPE_CHECKING = False
"""Type checkers take it for true.  Nothing is imported here, of Python neither: ``python -m plait`` comes by here with
the current folder first on its path."""

if TYPE_CHECKING:
    from plait.api import distributed_sampler, join, rank_batches, run_threads, sum_of_mean
    from plait.checkpoint.load import Loaded, load
    from plait.checkpoint.save import Saver, save
    from plait.checkpoint.stateful import Checkpointed
    from plait.comm import Comm
    from plait.table.cells import TABLE, Cell, Strategy, parse_strategy
    from plait.table.layout import Layout
    from plait.table.mesh import Mesh
    from plait.table.parallelism import Parallelism
    from plait.table.precision import LossScale
    from plait.step import EMA, Engine, Evaluation, StepResult, elementwise, empty_parameters
    from plait.run.injection import inject
    from plait.run.job.own import UserJob
    from plait.sharded import (
        LayoutError,
        ShardedTensor,
        annotate,
        auto_redistribute,
        dropout_stream,
        explain,
        from_dtensor,
        to_dtensor,
    )
    from plait.tensor import cross_entropy_sum
    from plait.referee.verify.resume import verify_resume as verify_resume
    from plait.referee.verify.run import verify as verify
    from plait.referee.witness.judge import judge as judge
    from plait.referee.witness.record import witness as witness
else:

    def __getattr__(name):
        from plait.later import later

        return later(__name__, _MODULES)(name)

    def __dir__():
        return sorted({*globals(), *__all__})


_MODULES = {
    "api": "distributed_sampler join rank_batches run_threads sum_of_mean",
    "checkpoint.load": "Loaded load",
    "checkpoint.save": "Saver save",
    "checkpoint.stateful": "Checkpointed",
    "comm": "Comm",
    "core.cells": "TABLE Cell Strategy parse_strategy",
    "core.layout": "Layout",
    "core.mesh": "Mesh",
    "core.parallelism": "Parallelism",
    "core.precision": "LossScale",
    "engine": "EMA Engine Evaluation StepResult elementwise empty_parameters",
    "injection": "inject",
    "job.own": "UserJob",
    "sharded": "LayoutError ShardedTensor annotate auto_redistribute dropout_stream explain from_dtensor to_dtensor",
    "tensor_parallel": "cross_entropy_sum",
    "verify.resume": "verify_resume",
    "witness.judge": "judge",
}
"""What each brings, imported when it is asked for; ``verify`` and ``witness`` are modules that can be called."""

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "TABLE",
    "Cell",
    "Checkpointed",
    "Comm",
    "Engine",
    "Evaluation",
    "Layout",
    "Loaded",
    "LossScale",
    "Mesh",
    "Parallelism",
    "Saver",
    "StepResult",
]
__all__ += ["Strategy", "distributed_sampler", "empty_parameters", "join", "load", "parse_strategy", "rank_batches"]
__all__ += ["elementwise", "run_threads", "save", "sum_of_mean"]
__all__ += ["LayoutError", "ShardedTensor", "annotate", "auto_redistribute", "cross_entropy_sum", "dropout_stream"]
__all__ += ["UserJob", "explain", "from_dtensor", "inject", "judge", "to_dtensor", "verify", "verify_resume", "witness"]
