"""How activations travel where a module's own code works on pieces, or on a stream that sequence parallelism cuts.

split      a whole stream is cut in time           backward: gathered
unsplit    a stream that is cut becomes whole      backward: this rank's part of a gradient that is whole
share      cut code reads a whole activation       backward: the sum of the ranks' shares
"""

from typing import Any

import torch
from torch import Tensor

from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor.axis import TensorAxis, first_order


class Split(torch.autograd.Function):
    """A whole stream is cut in time; backward gathers it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, site: str) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 3:
            given = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"{site!r}, whose stream the tensor plan cuts in time, has {given} for it, not [batch, time, width]: "
                f"say 'split' for the first module that gets the stream as its first argument, such as a block"
            )
        ctx.axis, ctx.site, ctx.length = axis, site, x.size(1)
        axis.length = ctx.length
        start, stop = axis.part(ctx.length)
        return x[:, start:stop].contiguous()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis: TensorAxis = ctx.axis
        return axis.start_gather(gradient, 1, ctx.length, axis.note(BACKWARD, ctx.site))(), None, None


class Share(torch.autograd.Function):
    """Whole tensors that cut computation reads, which makes a share of their gradients on each rank.

    Backward: the sums; with ``last``, only of that many of the last dim, as the others are read by what sums itself.
    """

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, site: str, last: int | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.site, ctx.last = axis, site, last
        views = tuple(x.view_as(x) for x in tensors)
        ctx.mark_non_differentiable(*(y for y, needs in zip(views, ctx.needs_input_grad[3:], strict=True) if not needs))
        return views

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        note = ctx.axis.note(BACKWARD, ctx.site)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        whole = {i: gradients[i].clone(memory_format=torch.contiguous_format) for i in wanted}
        shares = {i: g if ctx.last is None else g[..., -ctx.last :] for i, g in whole.items()}
        finish = {i: ctx.axis.start_sum(share, note) for i, share in shares.items()}
        for i in wanted:
            shares[i].copy_(finish[i]())
        return (None, None, None, *map(whole.get, range(len(gradients))))


class Unsplit(torch.autograd.Function):
    """A stream that is cut in time becomes whole; backward keeps this rank's part of a gradient that is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, site: str) -> Tensor:
        axis.check_stream(x, site, whole=False)
        ctx.part = axis.part(axis.length)
        return axis.start_gather(x, 1, axis.length, axis.note(FORWARD, site))()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.part
        return gradient[:, start:stop].contiguous(), None, None
