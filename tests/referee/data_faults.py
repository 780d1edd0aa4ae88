"""Faults of the data axes: sums, gathers, microbatches, dropout, norms, counts, published values.

A fault breaks the code by a monkeypatch. It is in place while the layout runs and gone when the reference does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import verify_cases as cases
from torch import Tensor

from plait.comm.thread import ThreadComm
from plait.forward.context import RNGPosition
from plait.pipeline.stage import Stage
from plait.step.exchange import Exchange
from plait.step.norm import Norm
from plait.table.collectives import Note
from plait.zero.flat_gradient import FlatGradient
from plait.zero.gradients import Gradients
from plait.zero.unit import Unit

Patch = pytest.MonkeyPatch


def drop_a_reduction(patch: Patch) -> None:
    """The reduction of one unit's gradients is never sent."""
    cases.not_sent(patch, lambda message, note: note.unit == "1" and message.kind in ("reduce_scatter", "all_reduce"))


def skip_the_first_layer(patch: Patch) -> None:
    """The loop of a backward stops one layer short: layer 0 never trains."""
    original = FlatGradient.take

    def take(self: FlatGradient, index: int, gradient: Tensor) -> None:
        name = self.flat.layout.slots[index].name
        original(self, index, torch.zeros_like(gradient) if name.startswith("0.") else gradient)

    patch.setattr(FlatGradient, "take", take)


def average_instead_of_sum(patch: Patch) -> None:
    for name in ("_reduce_scatter", "_all_reduce"):
        original = getattr(ThreadComm, name)

        def averaged(self: ThreadComm, call: Any, out: Tensor, *rest: Tensor, original: Any = original) -> Any:
            work = original(self, call, out, *rest)
            if out.is_floating_point():
                out /= len(call.group.ranks)
            return work

        patch.setattr(ThreadComm, name, averaged)


def swap_two_shards(patch: Patch) -> None:
    """A gather lays the pieces of ranks 0 and 1 in each other's place."""
    original = ThreadComm._all_gather

    def gather(self: ThreadComm, call: Any, out: Tensor, piece: Tensor) -> Any:
        mine = piece.clone()
        work = original(self, call, out, piece)
        if call.note.phase in ("forward", "backward"):
            n = len(mine)
            out[: 2 * n] = torch.cat((out[n : 2 * n], out[:n]))
        return work

    patch.setattr(ThreadComm, "_all_gather", gather)


def drop_the_last_microbatch(patch: Patch) -> None:
    original = Stage.backward

    def backward(self: Stage, microbatch: int, gradients: list[Tensor], *, last: bool) -> Any:
        return original(self, microbatch, [0 * g if last else g for g in gradients], last=last)

    patch.setattr(Stage, "backward", backward)


def keep_only_the_last_microbatch(patch: Patch) -> None:
    original = FlatGradient.accumulate

    def accumulate(self: FlatGradient, piece: Tensor) -> None:
        self.started = False
        original(self, piece)

    patch.setattr(FlatGradient, "accumulate", accumulate)


def never_zero_gradients(patch: Patch) -> None:
    """The accumulators go on from the last step's sums."""

    def begin_step(self: Gradients) -> None:
        for unit in self.order:
            unit.summed = False
        self._next_step = 0

    patch.setattr(Gradients, "begin_step", begin_step)


def dropout_by_local_sample(patch: Patch) -> None:
    """Masks drawn from the place in the microbatch instead of the global sample index."""
    patch.setattr("plait.step.engine.RNGPosition", lambda step, m, first, *sizes: RNGPosition(step, m, 0, *sizes))


def dropout_the_same_in_every_step(patch: Patch) -> None:
    patch.setattr("plait.step.engine.RNGPosition", lambda step, m, first, *sizes: RNGPosition(0, m, first, *sizes))


def norm_counts_replicas_twice(patch: Patch) -> None:
    patch.setattr(Norm, "counts", lambda self, owned: True)


def norm_of_this_rank_only(patch: Patch) -> None:
    original = Exchange.report

    def report(self: Exchange, squares: float, *rest: Any) -> Any:
        return original(self, squares, *rest)._replace(squares=squares)

    patch.setattr(Exchange, "report", report)


def mean_of_means(patch: Patch) -> None:
    """Every rank divides by its own count, times the ranks."""
    original = Exchange.counts

    def counts(self: Exchange, microbatches: int, targets: int, *more: Any) -> tuple[int, int]:
        first, _ = original(self, microbatches, targets, *more)
        return first, targets * self.ranks

    patch.setattr(Exchange, "counts", counts)


def reduce_across_replicas_every_microbatch(patch: Patch) -> None:
    """Right numbers, M times the traffic: what accumulation without "no sync" pays."""
    original = Gradients.end_microbatch

    def end_microbatch(self: Gradients) -> None:
        original(self)
        spare = torch.zeros(16)
        self.comm.all_reduce(spare, ("replica",), note=Note("step", "again")).wait()

    patch.setattr(Gradients, "end_microbatch", end_microbatch)


def never_publish(patch: Patch) -> None:
    """Updated pieces stay with their owners."""
    patch.setattr(Unit, "publish", lambda self: [])


def every_layer_from_one_seed(patch: Patch) -> None:
    """Initial values from the seed alone, so equal layers and shards begin equal."""
    import plait.zero.state.init as init

    original = init.PrivateGenerator
    patch.setattr(init, "PrivateGenerator", lambda device, *key: original(device, "init", 0))


def add_ranks_in_reverse(patch: Patch) -> None:
    """A sum in another order: a few last bits, which only the replay of the tree can see."""
    import plait.comm.thread as thread

    original = thread.ordered_sum

    def backwards(parts: list[Tensor], sizes: Any, op: str, out: Tensor) -> None:
        original(parts[::-1], tuple(sizes)[::-1], op, out)

    patch.setattr(thread, "ordered_sum", backwards)
