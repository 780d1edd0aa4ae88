"""Column- and row-cut products on local tensors, forward and backward.

    column   x whole ─► y = x W_r^T          y cut in its last dim       backward: dx is a sum over the ranks
    row      x cut   ─► y = Σ x_r W_r^T      y whole                     backward: none

Siblings that read one tensor (query, key, value; gate, up) share one ``Entered``.  The gradient of their input is the
sum of theirs.  It is reduced once, while this rank computes the weight products:

    forward   x ── Finish ── Hold q, k, v ── Start ─┬─ Column q ─►
                                                    ├─ Column k ─►
                                                    └─ Column v ─►
    backward  dq, dk, dv ─► Column: dx += dq Wq ...   (q, x) waits in the entry
              Start         starts the reduction of dx
              Hold          dWq, dWk, dWv
              Finish        waits for dx

Autograd runs the ready node that was created last, so it runs Start before any Hold and every Hold before Finish.  A
Hold is an edge to its weight and reads no values.  Nothing reaches the Hold of a sibling that is not called, so its
weight gets no gradient.

Under sequence parallelism Finish gathers the stream forward and scatters its gradient backward, and a row's sum is
scattered: reduce_scatter and all_gather instead of the all_reduce.

No function saves a weight, because the weight's unit may be resharded and gathered again before the backward.  The
function keeps the parameter and reads its values when its backward runs.  Where weight gradients have their own pass
(``axis.later``), the weight is no input of any function, and its products wait in the microbatch's list.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm.padded import Finish as Finishing
from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor.axis import Later, TensorAxis, first_order
from plait.torch_private import DisableTorchFunctionSubclass

Pair = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def weight_product(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns dW [out, in] of y = x W^T."""
    return rows(gradient).t() @ rows(x).to(gradient.dtype)


def rows(x: Tensor) -> Tensor:
    """Views [..., n] as [rows, n], even where n is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def input_product(gradient: Tensor, weight: Tensor) -> Tensor:
    """Returns dx of y = x W^T, in the dtype of the gradient (under autocast the weight is stored in another)."""
    return gradient @ weight.to(gradient.dtype)


def bias_sum(gradient: Tensor) -> Tensor:
    """Returns db [out] of y = x W^T + b."""
    return rows(gradient).sum(0)


def values(weight: Tensor) -> Tensor:
    """The values of a parameter, plain and without a graph."""
    with DisableTorchFunctionSubclass():
        return weight.detach()


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def token(like: Tensor) -> Tensor:
    """Returns an input that makes autograd record a function whose weight is not among its inputs."""
    return torch.zeros((), device=like.device, requires_grad=True)


class SharedInput:
    """An activation that enters at a site, shared by its siblings' functions.  ``pairs`` has all siblings, even those
    that will not read it."""

    def __init__(self, axis: TensorAxis, site: str, pairs: Sequence[Pair], *, wants_input: bool) -> None:
        self.axis, self.site, self.pairs, self.wants_input = axis, site, pairs, wants_input
        self.length = axis.length if axis.sequence else 0
        self.waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Output gradients and inputs of each sibling's weight products, by its index."""
        self.finish: Finishing | None = None
        """The reduction that is under way."""

    def hold(self, index: int) -> Tensor | None:
        """Returns the stand-in that a column takes for its weight and bias; None if it needs none."""
        weight, bias = self.pairs[index]
        if not torch.is_grad_enabled() or not any(p is not None and p.requires_grad for p in (weight, bias)):
            return None
        later = self.axis.later(weight)
        if later is not None:
            self.axis.later(weight if bias is None else bias)  # so they keep their order
            return token(weight)
        return cast(Tensor, Hold.apply(self, index, weight, bias))


class Entered:
    """A whole activation that column-cut siblings read.  The same tensor, unchanged, does not enter twice."""

    def __init__(self, source: Tensor, axis: TensorAxis, site: str, pairs: Sequence[Pair]) -> None:
        self._source, self._state = weakref.ref(source), _state(source)
        self.entry = SharedInput(axis, site, pairs, wants_input=source.requires_grad)
        whole: Tensor = Finish.apply(source, self.entry)
        self._holds = [self.entry.hold(index) for index in range(len(pairs))]
        self.tensor: Tensor = Start.apply(whole, self.entry) if whole.requires_grad else whole

    def column(self, index: int, *, bias: bool = True) -> Tensor:
        """The output of sibling ``index``, cut in its last dim."""
        return cast(Tensor, Column.apply(self.tensor, self._holds[index], self.entry, index, bias))

    def is_of(self, source: Tensor, site: str) -> bool:
        """True for the tensor that entered here, unchanged since, and for the result of its entering."""
        known = source is self.tensor or (self._source() is source and self._state == _state(source))
        return known and self.entry.site == site


def _state(source: Tensor) -> tuple[bool, int]:
    """A key that changes when a tensor has to enter anew: recording began or ended, or it was written to."""
    return torch.is_grad_enabled(), _version(source)


class Finish(torch.autograd.Function):
    """Returns the whole stream.  Backward waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: SharedInput) -> Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        if not entry.length:
            return x.view_as(x)
        axis = entry.axis
        axis.check_stream(x, entry.site, whole=False)
        return axis.start_gather(x, 1, entry.length, axis.note(FORWARD, entry.site))()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        finish, ctx.entry.finish = ctx.entry.finish, None
        return None if finish is None else finish(), None


class Start(torch.autograd.Function):
    """Passes the stream to the columns.  Backward starts the reduction of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: SharedInput) -> Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        entry: SharedInput = ctx.entry
        axis = entry.axis
        if gradient is not None:
            start = axis.start_scatter if entry.length else axis.start_sum
            entry.finish = start(gradient, axis.note(BACKWARD, entry.site))
        return gradient, None


class Hold(torch.autograd.Function):
    """An edge to a weight and a bias.  Backward computes their products, while the reduction is under way."""

    @staticmethod
    def forward(ctx: Any, entry: SharedInput, index: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.entry, ctx.index = entry, index
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=weight.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        entry: SharedInput = ctx.entry
        _, _, wants_weight, wants_bias = ctx.needs_input_grad
        dw = db = None
        for gradient, x in entry.waiting.pop(ctx.index, ()):
            if wants_weight:
                product = weight_product(gradient, x)
                dw = product if dw is None else dw.add_(product)
            if wants_bias:
                total = bias_sum(gradient)
                db = total if db is None else db.add_(total)
        return None, None, dw, db


class Column(torch.autograd.Function):
    """y = x W^T + b for this rank's rows of W; the gradients of W and b leave through its Hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hold: Tensor | None, entry: SharedInput, index: int, with_bias: bool) -> Tensor:
        weight, bias = entry.pairs[index]
        ctx.entry, ctx.index, ctx.with_bias = entry, index, with_bias
        ctx.save_for_backward(None if hold is None else x)
        b = None if bias is None or not with_bias else values(bias)
        y = F.linear(x, values(weight), b)
        # A product of more than two dims is a view of one of two, and autograd refuses writes to such a view.
        unviewed: Tensor = torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y
        return unviewed

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        entry: SharedInput = ctx.entry
        (x,) = ctx.saved_tensors
        if x is not None:
            weight, bias = entry.pairs[ctx.index]
            if not put_off(entry.axis, weight, partial(weight_product, gradient, x)):
                entry.waiting.setdefault(ctx.index, []).append((gradient, x))
            elif bias is not None and ctx.with_bias:
                put_off(entry.axis, bias, partial(bias_sum, gradient))
        dx = input_product(gradient, values(entry.pairs[ctx.index][0])) if entry.wants_input else None
        return dx, None, None, None, None


def put_off(axis: TensorAxis, parameter: Tensor, make: Any) -> bool:
    """Leaves a gradient for the pass of weight gradients; False if the microbatch has no such pass."""
    later: Later | None = axis.later(parameter)
    if later is None:
        return False
    later.append(make)
    return True


class Row(torch.autograd.Function):
    """y = Σ x_r W_r^T over the ranks, whole or cut in time; a bias is added afterwards, once.

    ``edge`` is the weight, or a token if its gradient is computed later.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: Tensor, weight: tuple[Tensor], axis: TensorAxis, site: str) -> Tensor:
        if axis.sequence:
            axis.check_stream(x, site, whole=True)
        ctx.axis, ctx.site, ctx.length = axis, site, axis.length if axis.sequence else 0
        ctx.weight = weight[0]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        start = axis.start_scatter if axis.sequence else axis.start_sum
        return start(F.linear(x, values(weight[0]), None), axis.note(FORWARD, site))()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, weight = ctx.axis, ctx.weight
        (x,) = ctx.saved_tensors
        if ctx.length:
            gradient = axis.start_gather(gradient, 1, ctx.length, axis.note(BACKWARD, ctx.site))()
        dx = input_product(gradient, values(weight)) if ctx.needs_input_grad[0] else None
        dw = None
        if x is not None and not put_off(axis, weight, partial(weight_product, gradient, x)):
            dw = weight_product(gradient, x)
        return dx, dw, None, None, None


def row(x: Tensor, weight: Tensor, axis: TensorAxis, site: str) -> Tensor:
    """Returns the sum of the ranks' products."""
    waits = weight.requires_grad and torch.is_grad_enabled() and axis.later(weight) is not None
    return cast(Tensor, Row.apply(x, token(x) if waits else weight, (weight,), axis, site))
