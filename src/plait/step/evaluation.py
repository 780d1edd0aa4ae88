"""The loss without a step: only forwards run, on all ranks, and the state of training does not change.

    counts      as in a step                                             one small all_gather
    F0 F1 …     the order's forwards; units are gathered and freed       as the row says
    losses      of every data rank, added exactly                        one small all_gather

Modules are in eval mode and nothing is drawn.  Persistent buffers have data rank 0's values, as in a state dict, and
each rank's own again afterwards: BatchNorm evaluates one model on all ranks, and trains on with each rank's statistics.

Evaluations have their own runtime, so that their message shapes and gather order stay apart from the step's.  In the
ledger, all their messages have the phase ``evaluate``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.pipeline_runtime import runtime_of
from plait.pipeline.stage import LossFn
from plait.step.exchange import Exchange
from plait.step.placed_model import PlacedModel
from plait.step.step import num_samples, whole_count
from plait.table.agreement import DATA_ORDER, MARKS
from plait.table.collectives import Note
from plait.zero.unshard import EVALUATE


@dataclass(frozen=True)
class Evaluation:
    """The result of ``Engine.evaluate``, the same on every rank."""

    loss: float
    """The mean over all ranks' microbatches."""
    count: int
    """The number of terms in the mean."""


class Evaluator:
    """Evaluates a model in training."""

    def __init__(self, placed: PlacedModel) -> None:
        self.placed, comm = placed, placed.comm
        p2p = None if placed.pipeline.plain else PipelineP2P(comm, placed.pipeline.owner)
        self.runtime = runtime_of(placed.stages, p2p)
        self.exchange = Exchange(comm, (), placed.exchange.losses_at)
        self.broken = False
        """True after an evaluation raised in the middle of a pipeline: its messages may still be under way."""

    def evaluate(self, microbatches: Iterable[Any], loss_fn: LossFn, count_fn: Callable[[Any], int]) -> Evaluation:
        """See ``Engine.evaluate``."""
        comm, stages = self.placed.comm, self.placed.stages.values()
        if not (num := len(given := list(microbatches))):
            raise ValueError("no microbatch: an evaluation needs at least one, an empty one included")
        program = self.placed.program(num, backward=False)
        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(comm.ledger.phase(EVALUATE))
            microbatches, whole = self.placed.cut_in_time(given, count_fn)
            samples = sum(num_samples(batch) for batch in microbatches)
            count = sum(whole_count(count_fn(batch)) for batch in microbatches)
            _, total = self.exchange.counts(num, count, samples, (), given, whole)
            models = [stage.model for stage in stages]
            stack.enter_context(eval_mode(self.placed.model, *models))
            stack.enter_context(buffers_of_data_rank_0(models, comm))
            for stage in stages:
                stack.enter_context(stage.unsharding.evaluation())
            self.broken = comm.mesh.pipe > 1
            self.runtime.evaluate(program, microbatches, loss_fn)
            here = self.runtime.losses
            mine = [here[m].item() if here else 0.0 for m in range(num)]
            report = self.exchange.report(0.0, mine, set(), [0.0] * MARKS)
            self.broken = False
        return Evaluation(math.fsum(loss for losses in report.losses for loss in losses) / total, total)


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Puts every module in eval mode inside, and in its former mode afterwards."""
    modes = {module: module.training for model in models for module in model.modules()}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def buffers_of_data_rank_0(models: Sequence[nn.Module], comm: Comm) -> Iterator[None]:
    """Gives every persistent buffer data rank 0's values inside, and its own values again afterwards."""
    places = [
        (module, key, buffer)
        for module in {m: None for model in models for m in model.modules()}
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    ]
    before: dict[Tensor, Tensor] = {buffer: buffer.clone() for _, _, buffer in places}
    for buffer in before:
        sent = buffer.reshape(-1).clone()
        comm.broadcast(sent, DATA_ORDER, 0, note=Note(EVALUATE)).wait()
        buffer.copy_(sent.view(buffer.shape))
    try:
        yield
    finally:
        for module, key, buffer in places:
            buffer.copy_(before[buffer])
            module._buffers[key] = buffer
