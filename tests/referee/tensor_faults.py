"""Faults of the tensor axis.

The jobs are in fp64: a fault that is small enough for a tolerance would have to be rounding.
"""

from dataclasses import replace
from typing import Any

import torch
from planted import Patch, after, instead
from torch import Tensor
from verify_cases import MLP, not_sent

from plait.comm.base import DONE, NO_NOTE
from plait.comm.thread import ThreadComm
from plait.forward.tensor_parallel import StageTensor
from plait.run.config.settings import VerifyConfig
from plait.step.exchange import Exchange
from plait.step.norm import Norm
from plait.table.collectives import Note
from plait.table.flat import Run
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor import cut_weight, linear, vocabulary
from plait.tensor.axis import TensorAxis
from plait.tensor.cut_weight import LINEARS
from plait.tensor.linear import Entered, Row, SharedInput
from plait.zero import place

GPT = VerifyConfig(
    model="gpt", layers=2, width=24, heads=6, kv_heads=6, batch=13, length=9, steps=2, clip=0.3, dtype="fp64",
    mesh="tensor=2", bucket=0,
)  # fmt: skip
FOUR = replace(GPT, width=32, heads=4, kv_heads=4, mesh="tensor=4")
"""The text's tokens lie below 128: on two ranks the second one's rows would never be looked up."""
DEEP = replace(MLP, layers=5, width=9, steps=2, dtype="fp64", dropout=0.2, mesh="tensor=2")
"""Pairs of layers with biases."""


def skip(patch: Patch, phase: str, unit: str) -> None:
    """The sums of one phase, at the units whose name ends so, stay this rank's own share."""

    def start_sum(original: Any, self: TensorAxis, x: Tensor, note: Note) -> Any:
        lost = note.phase == phase and note.unit.endswith(unit)
        return (lambda: x) if lost else original(self, x, note)

    def start_scatter(original: Any, self: TensorAxis, x: Tensor, note: Note) -> Any:
        lost = note.phase == phase and note.unit.endswith(unit)
        own = lambda: x[:, slice(*self.part(x.size(1)))].contiguous()  # noqa: E731
        return own if lost else original(self, x, note)

    instead(TensorAxis, "start_sum")(start_sum)(patch)
    instead(TensorAxis, "start_scatter")(start_scatter)(patch)


def drop_the_reduction_of_what_enters(patch: Patch) -> None:
    skip(patch, BACKWARD, "mlp")


def drop_the_sum_after_a_row(patch: Patch) -> None:
    skip(patch, FORWARD, "down")


def drop_the_sum_after_the_embedding(patch: Patch) -> None:
    skip(patch, FORWARD, "embed")


def forget_to_sum_what_is_summed(patch: Patch) -> None:
    """The gradients of norms under sequence parallelism stay this rank's share of time."""
    not_sent(patch, lambda message, note: message.axes == ("tensor",) and note.unit == "blocks.1")


def norm_counts_whole_parameters_on_every_tensor_rank(patch: Patch) -> None:
    patch.setattr(Norm, "counts", lambda self, owned: self.first_copy)


def norm_counts_the_first_tensor_rank_alone(patch: Patch) -> None:
    patch.setattr(Norm, "counts", lambda self, owned: self.first_copy[owned.flat.axes] and not owned.flat.tensor_rank)


def every_rank_draws_the_mask_of_the_first(patch: Patch) -> None:
    patch.setattr(StageTensor, "slice_of", lambda self, name, shape: None)


def skip_a_bias(patch: Patch) -> None:
    for style, original in list(LINEARS.items()):
        patch.setitem(LINEARS, style, lambda site, x, w, bias, original=original: original(site, x, w, None))


def add_a_row_bias_on_every_rank(patch: Patch) -> None:
    row = LINEARS["row"]
    patch.setitem(LINEARS, "row", lambda site, x, w, bias: row(site, x, w, bias) + bias * (site.axis.ways - 1))


@instead(place, "RunPlace")
def swap_the_pieces_of_two_ranks(original: Any, run: Run, cut: TensorCut | None, index: int) -> Any:
    """Row-cut weights are on each other's rank (a swap of everything would only renumber the ranks)."""
    return original(run, cut, 1 - index if cut is not None and cut.dim == 1 else index)


@instead(place, "RunPlace")
def number_the_ranks_the_other_way_round(original: Any, run: Run, cut: TensorCut | None, index: int) -> Any:
    """Everything on the other rank, consistently: heads draw each other's dropout, classes are off."""
    return original(run, cut, 1 - index)


@instead(cut_weight, "embedding")
def look_tokens_up_one_row_off(
    original: Any, tokens: Tensor, weight: Tensor, size: int, *rest: Any, **more: Any
) -> Any:
    return original(tokens, weight, size + 4, *rest, **more)


@instead(vocabulary, "part")
def count_classes_from_the_wrong_one(original: Any, size: int, ways: int, index: int) -> tuple[int, int]:
    start, stop = original(size, ways, index)
    return start + (start > 0), stop


def loss_hears_no_other(patch: Patch, which: int) -> None:
    """One of the three numbers per target is this rank's own in the place of every rank's."""

    def all_gather(original: Any, self: ThreadComm, out: Tensor, piece: Tensor, axes: Any, note: Note = NO_NOTE) -> Any:
        work = original(self, out, piece, axes, note)
        if note == vocabulary.LOSS:
            work.wait()
            out[:, which] = piece[which]
        return work

    instead(ThreadComm, "all_gather")(all_gather)(patch)


def take_ones_own_largest_logit(patch: Patch) -> None:
    loss_hears_no_other(patch, 0)


def take_ones_own_sum_of_exponentials(patch: Patch) -> None:
    loss_hears_no_other(patch, 1)


def take_ones_own_target_logit(patch: Patch) -> None:
    loss_hears_no_other(patch, 2)


def compare_the_inputs_before_every_forward(patch: Patch) -> None:
    patch.setattr(StageTensor, "_same_inputs", property(lambda self: False, lambda self, known: None), raising=False)


@instead(ThreadComm, "all_gather")
def drop_the_message_of_the_loss(
    original: Any, self: ThreadComm, out: Tensor, piece: Tensor, axes: Any, note: Note = NO_NOTE
) -> Any:
    if note != vocabulary.LOSS:
        return original(self, out, piece, axes, note)
    out.copy_(piece.expand_as(out))
    return DONE


@instead(linear, "weight_product")
def multiply_with_another_input(original: Any, gradient: Tensor, x: Tensor) -> Any:
    """A weight product computed from the neighbour's sample."""
    return original(gradient, x.roll(1, 0))


@after(SharedInput, "__init__")
def multiply_siblings_with_each_others_gradients(self: SharedInput, *settings: Any) -> None:
    """The weight products are read off by one: gate's becomes up's."""
    self.waiting = Turned() if self.site.endswith("mlp") else {}


class Turned(dict):  # type: ignore[type-arg]
    """Files what comes from two siblings the wrong way round."""

    def setdefault(self, index: int, default: Any = None) -> Any:
        return super().setdefault(1 - index, default)


@instead(ThreadComm, "_all_gather")
def lay_time_in_the_wrong_order(original: Any, self: ThreadComm, call: Any, out: Tensor, piece: Tensor) -> Any:
    """A gather of the stream puts rank 1's time before rank 0's."""
    work = original(self, call, out, piece)
    if call.note.phase == FORWARD:
        out.copy_(out.flip(0) if out.dim() > 1 else torch.cat(out.chunk(2)[::-1]))
    return work


@instead(Row, "backward")
def add_a_rows_weight_gradient_twice(original: Any, ctx: Any, gradient: Tensor) -> Any:
    x, weight, *rest = original(ctx, gradient)
    return x, 2 * weight, *rest


@instead(Exchange, "counts")
def count_targets_on_every_tensor_rank(original: Any, self: Exchange, *numbers: Any) -> tuple[int, int]:
    first, total = original(self, *numbers)
    return first, total * self.tensor


def enter_for_every_sibling(patch: Patch) -> None:
    """Right numbers, and a reduction for each of query, key and value."""
    patch.setattr(Entered, "is_of", lambda self, source, site: False)
