"""Column- and row-cut products on local tensors, forward and backward.

    column   x whole ─► y = x W_r^T          y cut in its last dim       backward: dx is a sum over the ranks
    row      x cut   ─► y = Σ x_r W_r^T      y whole                     backward: none

Siblings that read one tensor (query, key, value; gate, up) share one ``ColumnInput``: its gradient is the sum of
theirs, reduced once, while this rank makes the weight products:

    forward   x ── Enter ─┬─ Column q ─►          backward    dq ─► dx += dq Wq   (q, x) ─► queue
                          ├─ Column k ─►                      dk ─► dx += dk Wk   (k, x) ─► queue
                          └─ Column v ─►                      Enter:  start the reduction of dx
                                                                      dWq, dWk, dWv from the queue
                                                                      wait

Under sequence parallelism Enter gathers the stream forward and scatters its gradient backward, and a row's sum is
scattered: reduce_scatter and all_gather in place of the all_reduce.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor.axis import TensorAxis, first_order
from plait.tensor.gemm import TORCH, Gemm


def weight_product(gradient: Tensor, x: Tensor, gemm: Gemm = TORCH) -> Tensor:
    """dW [out, in] of y = x W^T."""
    return gemm.product(rows(gradient).t(), rows(x).to(gradient.dtype))


def rows(x: Tensor) -> Tensor:
    """[..., n] as [rows, n], even where n is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def input_product(gradient: Tensor, weight: Tensor, gemm: Gemm = TORCH) -> Tensor:
    """dx of y = x W^T, in the dtype of the gradient (under autocast the weight is stored in another)."""
    return gemm.product(gradient, weight.to(gradient.dtype))


class WeightGradQueue:
    """Siblings' output gradients, by index, from which ``Enter`` will make the weight products."""

    def __init__(self, axis: TensorAxis, site: str, wants_input: bool) -> None:
        self.axis, self.site, self.wants_input = axis, site, wants_input
        self.scatters = axis.sequence
        self.gradients: list[tuple[int, Tensor]] = []


class ColumnInput:
    """A whole activation as column-cut siblings read it.

    ``source`` enters; the same tensor, unchanged, does not enter twice.  ``weights`` are weight and bias (or None) of
    each sibling, whether or not it will read this tensor.
    """

    def __init__(
        self, source: Tensor, axis: TensorAxis, site: str, weights: Sequence[tuple[Tensor, Tensor | None]]
    ) -> None:
        self._source, self._state = weakref.ref(source), _state(source)
        self.queue = WeightGradQueue(axis, site, source.requires_grad)
        self.tensor: Tensor = Enter.apply(source, self.queue, *[t for pair in weights for t in pair])

    def column(self, weight: Tensor, bias: Tensor | None, index: int) -> Tensor:
        """The output of sibling ``index``, cut in its last dim."""
        bias = None if bias is None else bias.detach()
        y: Tensor = Column.apply(self.tensor, weight.detach(), bias, self.queue, index)
        return y

    def is_of(self, source: Tensor, site: str) -> bool:
        """Whether this tensor, unchanged since, entered here, or is what it became."""
        known = source is self.tensor or (self._source() is source and self._state == _state(source))
        return known and self.queue.site == site


def _state(source: Tensor) -> tuple[bool, int]:
    """What changes when a tensor has to enter anew: recording began or ended, or it was written to."""
    return torch.is_grad_enabled(), -1 if source.is_inference() else source._version


class Enter(torch.autograd.Function):
    """The stream, whole.  Backward reduces the input's gradient and makes the siblings' weight products meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: WeightGradQueue, *weights: Tensor | None) -> Tensor:
        axis = queue.axis
        note = axis.note(FORWARD, queue.site)
        if axis.sequence:
            axis.check_stream(x, queue.site, whole=False)
        whole = axis.start_gather(x, 1, axis.length, note)() if axis.sequence else x.view_as(x)
        ctx.queue = queue
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(whole if any(ctx.needs_input_grad[2:]) else None)
        return whole

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        queue: WeightGradQueue = ctx.queue
        axis, note = queue.axis, queue.axis.note(BACKWARD, queue.site)
        finish = None
        if gradient is not None and ctx.needs_input_grad[0]:
            finish = (axis.start_scatter if queue.scatters else axis.start_sum)(gradient, note)
        (x,) = ctx.saved_tensors
        products: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        for index, g in queue.gradients:
            for place, wanted in ((2 * index, weight_product), (2 * index + 1, _bias_sum)):
                if ctx.needs_input_grad[2 + place]:
                    product, before = wanted(g, x, axis.gemm), products[place]
                    products[place] = product if before is None else before.add_(product)
        queue.gradients.clear()
        return (finish() if finish else None, None, *products)


def _bias_sum(gradient: Tensor, x: Tensor, gemm: Gemm) -> Tensor:
    return rows(gradient).sum(0)


class Column(torch.autograd.Function):
    """y = x W^T + b for this rank's rows of W, which come detached: their gradients leave through ``Enter``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradQueue, index: int) -> Tensor:
        ctx.queue, ctx.index = queue, index
        ctx.save_for_backward(weight if queue.wants_input else None)
        y = queue.axis.gemm.linear(x, weight, bias)
        # A product of more than two dims is a view of one of two, and autograd lets nobody write to such a view.
        unviewed: Tensor = torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y
        return unviewed

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        ctx.queue.gradients.append((ctx.index, gradient))
        (weight,) = ctx.saved_tensors
        wanted = input_product(gradient, weight, ctx.queue.axis.gemm) if ctx.queue.wants_input else None
        return wanted, None, None, None, None


class Row(torch.autograd.Function):
    """y = Σ x_r W_r^T over the ranks, whole or cut in time; the bias is added afterwards, once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: TensorAxis, site: str) -> Tensor:
        if axis.sequence:
            axis.check_stream(x, site, whole=True)
        ctx.axis, ctx.site, ctx.length = axis, site, axis.length if axis.sequence else 0
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        finish = axis.start_scatter if axis.sequence else axis.start_sum
        return finish(axis.gemm.linear(x, weight, None), axis.note(FORWARD, site))()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        axis: TensorAxis = ctx.axis
        x, weight = ctx.saved_tensors
        if ctx.length:
            gradient = axis.start_gather(gradient, 1, ctx.length, axis.note(BACKWARD, ctx.site))()
        return (
            input_product(gradient, weight, axis.gemm) if ctx.needs_input_grad[0] else None,
            weight_product(gradient, x, axis.gemm) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )
