"""Faults of the data axes: sums, gathers, microbatches, dropout, norms, counts, published values.

A fault is in place while the layout runs and gone when the reference does.
"""

from typing import Any

import torch
import verify_cases as cases
from planted import Patch, after, instead
from torch import Tensor

from plait.comm import thread
from plait.comm.thread import ThreadComm
from plait.forward.context import RNGPosition
from plait.pipeline.stage import Stage
from plait.step.exchange import Exchange
from plait.step.norm import Norm
from plait.table.collectives import Note
from plait.zero.flat_gradient import FlatGradient
from plait.zero.gradients import Gradients
from plait.zero.state import init
from plait.zero.unit import Unit


def drop_a_reduction(patch: Patch) -> None:
    """The reduction of one unit's gradients is never sent."""
    cases.not_sent(patch, lambda message, note: note.unit == "1" and message.kind in ("reduce_scatter", "all_reduce"))


@instead(FlatGradient, "take")
def skip_the_first_layer(original: Any, self: FlatGradient, index: int, gradient: Tensor) -> None:
    """The loop of a backward stops one layer short: layer 0 never trains."""
    name = self.flat.layout.slots[index].name
    original(self, index, torch.zeros_like(gradient) if name.startswith("0.") else gradient)


def average_instead_of_sum(patch: Patch) -> None:
    def averaged(original: Any, self: ThreadComm, call: Any, out: Tensor, *rest: Tensor) -> Any:
        work = original(self, call, out, *rest)
        if out.is_floating_point():
            out /= len(call.group.ranks)
        return work

    for name in ("_reduce_scatter", "_all_reduce"):
        instead(ThreadComm, name)(averaged)(patch)


@instead(ThreadComm, "_all_gather")
def swap_two_shards(original: Any, self: ThreadComm, call: Any, out: Tensor, piece: Tensor) -> Any:
    """A gather lays the pieces of ranks 0 and 1 in each other's place."""
    n = piece.numel()
    work = original(self, call, out, piece)
    if call.note.phase in ("forward", "backward"):
        out[: 2 * n] = torch.cat((out[n : 2 * n], out[:n]))
    return work


@instead(Stage, "backward")
def drop_the_last_microbatch(original: Any, self: Stage, microbatch: int, gradients: Any, *, last: bool) -> Any:
    return original(self, microbatch, [0 * g if last else g for g in gradients], last=last)


@instead(FlatGradient, "accumulate")
def keep_only_the_last_microbatch(original: Any, self: FlatGradient, piece: Tensor) -> None:
    self.started = False
    original(self, piece)


@instead(Gradients, "begin_step")
def never_zero_gradients(original: Any, self: Gradients) -> None:
    """The accumulators go on from the last step's sums."""
    for unit in self.order:
        unit.ready = False
    self._next_step = 0


def dropout_by_local_sample(patch: Patch) -> None:
    """Masks drawn from the place in the microbatch instead of the global sample index."""
    patch.setattr("plait.step.engine.RNGPosition", lambda step, m, first, *sizes: RNGPosition(step, m, 0, *sizes))


def dropout_the_same_in_every_step(patch: Patch) -> None:
    patch.setattr("plait.step.engine.RNGPosition", lambda step, m, first, *sizes: RNGPosition(0, m, first, *sizes))


def norm_counts_replicas_twice(patch: Patch) -> None:
    patch.setattr(Norm, "counts", lambda self, owned: True)


@instead(Exchange, "report")
def norm_of_this_rank_only(original: Any, self: Exchange, squares: float, *rest: Any) -> Any:
    return original(self, squares, *rest)._replace(squares=squares)


@instead(Exchange, "counts")
def mean_of_means(original: Any, self: Exchange, microbatches: int, targets: int, *more: Any) -> tuple[int, int]:
    """Every rank divides by its own count, times the ranks."""
    return original(self, microbatches, targets, *more)[0], targets * self.ranks


@after(Gradients, "end_microbatch")
def reduce_across_replicas_every_microbatch(self: Gradients) -> None:
    """Right numbers, M times the traffic: what accumulation without "no sync" pays."""
    self.comm.all_reduce(torch.zeros(16), ("replica",), note=Note("step", "again")).wait()


def never_publish(patch: Patch) -> None:
    """Updated pieces stay with their owners."""
    patch.setattr(Unit, "publish", lambda self: [])


@instead(init, "PrivateGenerator")
def every_layer_from_one_seed(original: Any, device: Any, *key: Any) -> Any:
    """Initial values from the seed alone, so equal layers and shards begin equal."""
    return original(device, "init", 0)


@instead(thread, "ordered_sum")
def add_ranks_in_reverse(original: Any, parts: list[Tensor], sizes: Any, op: str, out: Tensor) -> None:
    """A sum in another order: a few last bits, which only the replay of the tree can see."""
    original(parts[::-1], tuple(sizes)[::-1], op, out)
