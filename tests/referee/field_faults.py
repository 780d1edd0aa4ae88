"""Faults like those that users of other engines met in training.

Sums lose their tail, a rank never updates, moments or master weights are forgotten, losses are means of means, masked
targets are counted, weights are those of the step before.
"""

import threading
from typing import Any

from planted import Patch, after, before, instead
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from plait.comm.operation import Alone
from plait.comm.thread import ThreadComm
from plait.forward import dropout
from plait.run.job.job import Job
from plait.step import Engine, reduce
from plait.step.exchange import Exchange
from plait.zero import gradients
from plait.zero.flat_gradient import FlatGradient
from plait.zero.optim import OwnedOptimizer
from plait.zero.storage import Flat
from plait.zero.unit import Unit


@instead(ThreadComm, "_all_reduce")
def lose_the_last_element(original: Any, self: ThreadComm, call: Any, whole: Tensor, *rest: Tensor) -> Any:
    own = whole[-1:].clone()
    work = original(self, call, whole, *rest)
    if whole.numel() > 8:
        whole[-1:] = own
    return work


@after(reduce, "give_gradients")
def last_rank_never_updates(owned: Any, touched: Any) -> None:
    for piece in owned:
        if piece.flat.comm.rank == piece.flat.comm.mesh.size - 1:
            piece.view.grad = None


@before(Engine, "before_update")
def forget_the_moments(self: Engine, optimizer: Any) -> None:
    optimizer.state.clear()


@before(Engine, "before_update")
def count_steps_from_the_start(self: Engine, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def never_unscale(patch: Patch) -> None:
    patch.setattr(reduce, "scale", lambda runs, factor: None)


@after(FlatGradient, "take")
def sum_in_16_bits(self: FlatGradient, *_: Any) -> None:
    whole = self.accumulated if self.direct else self.transient
    assert whole is not None
    whole.copy_(whole.bfloat16())


@after(Flat, "publish")
def forget_the_master_weights(self: Flat, *_: Any) -> None:
    assert self.master is not None
    self.master.copy_(self.updated_at_rest)


def read_the_weights_of_the_step_before(patch: Patch) -> None:
    patch.setattr(Unit, "forget", lambda self: None)


@instead(LambdaLR, "step")
def step_the_schedule_twice(original: Any, self: LambdaLR, *args: Any) -> None:
    original(self, *args)
    if self.last_epoch:  # not when it is made
        original(self, *args)


@instead(reduce, "clip_factor")
def clip_twice(original: Any, norm: float, limit: float) -> float:
    return float(original(norm, limit) ** 2)


@instead(Engine, "_functions")
def mean_of_the_microbatches_means(original: Any, self: Engine) -> Any:
    loss_fn, count_fn = original(self)
    return (lambda model, batch: loss_fn(model, batch) * 3 / max(1, count_fn(batch))), count_fn


@instead(Engine, "_functions")
def count_what_is_masked(original: Any, self: Engine) -> Any:
    return original(self)[0], lambda batch: batch["tokens"].numel()


@instead(Job, "microbatches")
def two_ranks_read_the_same_samples(original: Any, self: Job, step: int, rank: int, *rest: Any) -> Any:
    return original(self, step, 0 if rank == 1 else rank, *rest)


def replicas_part_in_odd_steps(patch: Patch) -> None:
    steps = threading.local()

    def begun(*_: Any) -> None:
        steps.number = getattr(steps, "number", 0) + 1

    def prepare(original: Any, comm: Any, message: Any, array: Tensor, *rest: Any, **options: Any) -> Any:
        own, made = array.clone(), original(comm, message, array, *rest, **options)
        if message.axes != ("replica",) or steps.number % 2:
            return made
        made.start().wait()
        array.copy_(own)  # everybody sends, and keeps what was its own
        return Alone()

    after(gradients.Gradients, "begin_step")(begun)(patch)
    instead(gradients, "prepare")(prepare)(patch)


@before(FlatGradient, "hand_over")
def reduce_one_gradient_early(self: FlatGradient) -> None:
    slot = self.flat.layout.slots[-1]
    assert self.transient is not None
    self.transient[slot.offset : slot.end].zero_()


@instead(Flat, "publish")
def a_units_update_stays_on_the_cpu(original: Any, self: Flat, note: Any) -> Any:
    old, works = self.updated_at_rest.clone(), original(self, note)
    if note.unit != "1":
        return works
    for work in works:
        work.wait()
    self.updated_at_rest.copy_(old)
    return []


@after(OwnedOptimizer, "__init__")
def flat_pieces_do_not_decay(self: OwnedOptimizer, optimizers: Any, *_: Any) -> None:
    for group in (group for one in optimizers for group in one.param_groups):
        if all(view.ndim < 2 for view in group["params"]):
            group["weight_decay"] = 0.0


@instead(Exchange, "report")
def report_the_last_microbatchs_loss(original: Any, self: Exchange, squares: float, losses: Any, *rest: Any) -> Any:
    return original(self, squares, (*(0.0 for _ in losses[1:]), *losses[-1:]), *rest)


@instead(FlatGradient, "take")
def exchange_the_gradients_of_equal_layers(original: Any, self: FlatGradient, index: int, gradient: Tensor) -> None:
    other = self.__dict__.setdefault("last", {})
    original(self, index, other.pop(gradient.shape, gradient))
    other[gradient.shape] = gradient.clone()


@after(OwnedOptimizer, "__init__")
def scale_the_rate_with_the_ranks(self: OwnedOptimizer, optimizers: Any, *_: Any) -> None:
    for group in (group for one in optimizers for group in one.param_groups):
        group["lr"] *= 2


@instead(dropout, "stream_key")
def seed_by_rank(original: Any, kind: Any, seed: int, *rest: Any) -> Any:
    return original(kind, seed + int(threading.current_thread().name.removeprefix("rank ")), *rest)


@before(Flat, "publish")
def round_the_parameters(self: Flat, note: Any) -> None:
    self.rest.copy_(self.rest.bfloat16())


@instead(reduce, "block_norms")
def squares_of_16_bits(original: Any, runs: Any) -> Any:
    return original(run.bfloat16().to(run.dtype) for run in runs)
