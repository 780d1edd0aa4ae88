"""plait trains one PyTorch model over many ranks and proves that the result is the run of a single process.

The library.  It imports none of the wings below.

table/          the place of state decides what is sent: mesh, cells, flat layout; pure.  Start with ``table/cells.py``
schedule/       pipelines as data: actions, orders, passes, the proof, the simulator; pure
comm/           worlds: ranks as processes or threads, and the ledger of their messages
zero/           units of parameters: gathered, reduced and updated together
forward/        dropout, recomputation and the function mode inside a forward
tensor/         linear layers, embeddings and losses cut over the tensor axis
pipeline/       stages, messages between them, and the runtime that obeys a schedule
step/           the engine: forward and backward of every microbatch, one reduction, one update
predict/        bytes and memory of a layout before it runs; pure
checkpoint/     runs on disk
messages/       text for people: sizes, hints, progress, escaping

The wings.  Each imports the library.

anymodel/       unmodified models: their pipelines, and tensor plans for code that works on pieces
sharded/        ``ShardedTensor``: tensors cut over named axes
shared_memory/  ranks of one host over memory that they share
remote.py       calls of functions on other ranks, with tensors
diloco.py       islands of ranks that train apart and come together every few steps
referee/        finds errors, with their place and their kind
run/            the command line: config, jobs, models, data, training, launching, watching, reports

api.py          the few calls that a script needs besides ``Engine``
torch_private.py  names that torch does not promise, each with its reason
"""

TYPE_CHECKING = False
"""Type checkers take it for true.  Nothing is imported here, not even from Python: ``python -m plait`` runs this with
the current folder first on its path."""

if TYPE_CHECKING:
    from plait.api import distributed_sampler, join, rank_batches, run_threads, sum_of_mean
    from plait.checkpoint.load import Loaded, load
    from plait.checkpoint.save import Saver, save
    from plait.comm import Comm
    from plait.referee.verify.resume import verify_resume as verify_resume
    from plait.referee.verify.run import verify as verify
    from plait.referee.witness.judge import judge as judge
    from plait.referee.witness.record import witness as witness
    from plait.run.injection import inject
    from plait.run.job.own import UserJob
    from plait.sharded import LayoutError, ShardedTensor, auto_redistribute, dropout_stream
    from plait.sharded.annotate import annotate as annotate
    from plait.sharded.explain import explain as explain
    from plait.sharded.layout import Layout
    from plait.step import EMA, Engine, Evaluation, StepResult, elementwise, empty_parameters
    from plait.table.cells import TABLE, Cell, Strategy, parse_strategy
    from plait.table.mesh import Mesh
    from plait.table.parallelism import Parallelism
    from plait.table.precision import LossScale
    from plait.tensor import cross_entropy_sum
else:

    def __getattr__(name):
        """Imports a name, or a subpackage, when it is first used: ``import plait`` needs no torch."""
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names.split():
                return getattr(import_module(f"plait.{module}"), name)
        try:
            return import_module(f"plait.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"plait.{name}":
                raise
        raise AttributeError(f"module 'plait' has no attribute {name!r}", name=name, obj=import_module("plait"))

    def __dir__():
        return sorted({*globals(), *__all__})


_MODULES = {
    "api": "distributed_sampler join rank_batches run_threads sum_of_mean",
    "checkpoint.load": "Loaded load",
    "checkpoint.save": "Saver save",
    "comm": "Comm",
    "table.cells": "TABLE Cell Strategy parse_strategy",
    "table.mesh": "Mesh",
    "table.parallelism": "Parallelism",
    "table.precision": "LossScale",
    "step": "EMA Engine Evaluation StepResult elementwise empty_parameters",
    "run.injection": "inject",
    "run.job.own": "UserJob",
    "sharded.layout": "Layout",
    "sharded": "LayoutError ShardedTensor annotate auto_redistribute dropout_stream explain",
    "tensor": "cross_entropy_sum",
    "referee.verify.resume": "verify_resume",
    "referee.verify.run": "verify",
    "referee.witness.judge": "judge",
    "referee.witness.record": "witness",
}
"""The names that each module provides.  A module is imported when one of its names is first used."""

__version__ = "0.1.0"

__all__ = ["EMA", "TABLE", "Cell", "Comm", "Engine", "Evaluation", "Layout", "Loaded", "LossScale", "Mesh"]
__all__ += ["Parallelism", "Saver", "StepResult"]
__all__ += ["Strategy", "distributed_sampler", "empty_parameters", "join", "load", "parse_strategy", "rank_batches"]
__all__ += ["elementwise", "run_threads", "save", "sum_of_mean"]
__all__ += ["LayoutError", "ShardedTensor", "annotate", "auto_redistribute", "cross_entropy_sum", "dropout_stream"]
__all__ += ["UserJob", "explain", "inject", "judge", "verify", "verify_resume", "witness"]
