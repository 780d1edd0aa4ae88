"""Faults like those that users of other engines met in training.

Sums lose their tail, a rank never updates, moments or master weights are forgotten, losses are means of means, masked
targets are counted, weights are those of the step before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from plait.comm.thread import ThreadComm
from plait.forward import dropout
from plait.run.job.job import Job
from plait.step import Engine, reduce
from plait.step.exchange import Exchange
from plait.zero import gradients
from plait.zero.flat_gradient import FlatGradient
from plait.zero.optim import OwnedOptimizer, give_gradients
from plait.zero.storage import Flat
from plait.zero.unit import Unit

Patch = pytest.MonkeyPatch


def before(patch: Patch, owner: Any, name: str, what: Callable[..., None]) -> None:
    """``what(self, ...)`` runs before a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        what(self, *args)
        return original(self, *args, **kwargs)

    patch.setattr(owner, name, method)


def behind(patch: Patch, owner: Any, name: str, what: Callable[..., None]) -> None:
    """``what(self, ...)`` runs behind a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        what(self, *args)
        return result

    patch.setattr(owner, name, method)


def lose_the_last_element(patch: Patch) -> None:
    original = ThreadComm._all_reduce

    def short(self: ThreadComm, call: Any, whole: Tensor, *rest: Tensor) -> Any:
        own = whole[-1:].clone()
        work = original(self, call, whole, *rest)
        if whole.numel() > 8:
            whole[-1:] = own
        return work

    patch.setattr(ThreadComm, "_all_reduce", short)


def last_rank_never_updates(patch: Patch) -> None:
    def leave_out(owned: Any, touched: Any) -> None:
        give_gradients(owned, touched)
        for piece in owned:
            if piece.flat.comm.rank == piece.flat.comm.mesh.size - 1:
                piece.view.grad = None

    patch.setattr("plait.step.reduce.give_gradients", leave_out)


def forget_the_moments(patch: Patch) -> None:
    before(patch, Engine, "before_update", lambda self, optimizer: optimizer.state.clear())


def count_steps_from_the_start(patch: Patch) -> None:
    def reset(self: Engine, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["step"].zero_()

    before(patch, Engine, "before_update", reset)


def never_unscale(patch: Patch) -> None:
    patch.setattr(reduce, "scale", lambda runs, factor: None)


def sum_in_16_bits(patch: Patch) -> None:
    def rounded(self: FlatGradient, *_: Any) -> None:
        whole = self.accumulated if self.direct else self.transient
        assert whole is not None
        whole.copy_(whole.bfloat16())

    behind(patch, FlatGradient, "take", rounded)


def forget_the_master_weights(patch: Patch) -> None:
    def forget(self: Flat, *_: Any) -> None:
        assert self.master is not None
        self.master.copy_(self.updated_at_rest)

    behind(patch, Flat, "publish", forget)


def read_the_weights_of_the_step_before(patch: Patch) -> None:
    patch.setattr(Unit, "forget", lambda self: None)


def step_the_schedule_twice(patch: Patch) -> None:
    original = LambdaLR.step

    def twice(self: LambdaLR, *args: Any) -> None:
        original(self, *args)
        if self.last_epoch:  # not when it is made
            original(self, *args)

    patch.setattr(LambdaLR, "step", twice)


def clip_twice(patch: Patch) -> None:
    original = reduce.clip_factor
    patch.setattr(reduce, "clip_factor", lambda norm, limit: original(norm, limit) ** 2)


def mean_of_the_microbatches_means(patch: Patch) -> None:
    original = Engine._functions

    def functions(self: Engine) -> Any:
        loss_fn, count_fn = original(self)
        return (lambda model, batch: loss_fn(model, batch) * 3 / max(1, count_fn(batch))), count_fn

    patch.setattr(Engine, "_functions", functions)


def count_what_is_masked(patch: Patch) -> None:
    original = Engine._functions
    patch.setattr(Engine, "_functions", lambda self: (original(self)[0], lambda batch: batch["tokens"].numel()))


def two_ranks_read_the_same_samples(patch: Patch) -> None:
    original = Job.microbatches

    def same(self: Job, step: int, rank: int, *rest: Any) -> Any:
        return original(self, step, 0 if rank == 1 else rank, *rest)

    patch.setattr(Job, "microbatches", same)


def replicas_part_in_odd_steps(patch: Patch) -> None:
    original, steps = gradients.send, threading.local()

    def begun(*_: Any) -> None:
        steps.number = getattr(steps, "number", 0) + 1

    def send(comm: Any, message: Any, array: Tensor, base: int, note: Any, out: Tensor | None = None) -> Any:
        if message.axes == ("replica",) and steps.number % 2 == 0:
            group = message  # everybody sends, and keeps what was its own
            own = array.clone()
            work = original(comm, group, array, base, note, out)
            work.wait()
            array.copy_(own)
            return work
        return original(comm, message, array, base, note, out)

    behind(patch, gradients.Gradients, "begin_step", begun)
    patch.setattr(gradients, "send", send)


def reduce_one_gradient_early(patch: Patch) -> None:
    def early(self: FlatGradient) -> None:
        slot = self.flat.layout.slots[-1]
        assert self.transient is not None
        self.transient[slot.offset : slot.end].zero_()

    before(patch, FlatGradient, "hand_over", early)


def a_units_update_stays_on_the_cpu(patch: Patch) -> None:
    original = Flat.publish

    def publish(self: Flat, note: Any) -> Any:
        if note.unit == "1":
            old = self.updated_at_rest.clone()
            works = original(self, note)
            for work in works:
                work.wait()
            self.updated_at_rest.copy_(old)
            return []
        return original(self, note)

    patch.setattr(Flat, "publish", publish)


def flat_pieces_do_not_decay(patch: Patch) -> None:
    def undecayed(self: OwnedOptimizer, optimizers: Any, *_: Any) -> None:
        for group in (group for one in optimizers for group in one.param_groups):
            if all(view.ndim < 2 for view in group["params"]):
                group["weight_decay"] = 0.0

    behind(patch, OwnedOptimizer, "__init__", undecayed)


def report_the_last_microbatchs_loss(patch: Patch) -> None:
    original = Exchange.report

    def report(self: Exchange, squares: float, losses: Any, *rest: Any) -> Any:
        return original(self, squares, (*(0.0 for _ in losses[1:]), *losses[-1:]), *rest)

    patch.setattr(Exchange, "report", report)


def exchange_the_gradients_of_equal_layers(patch: Patch) -> None:
    original = FlatGradient.take

    def take(self: FlatGradient, index: int, gradient: Tensor) -> None:
        other = self.__dict__.setdefault("last", {})
        original(self, index, other.pop(gradient.shape, gradient))
        other[gradient.shape] = gradient.clone()

    patch.setattr(FlatGradient, "take", take)


def scale_the_rate_with_the_ranks(patch: Patch) -> None:
    def scaled(self: OwnedOptimizer, optimizers: Any, *_: Any) -> None:
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] *= 2

    behind(patch, OwnedOptimizer, "__init__", scaled)


def seed_by_rank(patch: Patch) -> None:
    original = dropout.stream_key

    def key(kind: Any, seed: int, *rest: Any) -> Any:
        return original(kind, seed + int(threading.current_thread().name.removeprefix("rank ")), *rest)

    patch.setattr(dropout, "stream_key", key)


def round_the_parameters(patch: Patch) -> None:
    before(patch, Flat, "publish", lambda self, note: self.rest.copy_(self.rest.bfloat16()))


def squares_of_16_bits(patch: Patch) -> None:
    original = reduce.square_sum
    patch.setattr(reduce, "square_sum", lambda runs: original(run.bfloat16().to(run.dtype) for run in runs))
