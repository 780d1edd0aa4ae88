"""Communication around a module whose own code works on pieces, or on a stream that sequence parallelism cuts.

split      a whole stream is cut in time           backward: gathered
unsplit    a stream that is cut becomes whole      backward: this rank's part of a gradient that is whole
share      cut code reads a whole activation       backward: the sum of the ranks' shares
"""

from typing import Any, cast

import torch
from torch import Tensor

from plait.table.tensor_plan import BACKWARD
from plait.tensor.axis import Divide, Gather, TensorAxis, first_order


class Share(torch.autograd.Function):
    """Passes whole tensors to cut computation, which makes a share of their gradients on each rank.

    Backward: the sums; with ``last``, only of that many of the last dim, because the code that reads the others sums.
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


def split(x: Tensor, axis: TensorAxis, site: str) -> Tensor:
    """Cuts a whole stream in time."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        given = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"{site!r}, whose stream the tensor plan cuts in time, has {given} for it, not [batch, time, width]: "
            f"say 'split' for the first module that gets the stream as its first argument, such as a block"
        )
    axis.length = x.size(1)
    return cast(Tensor, cast(Any, Divide).apply(x, axis, 1, site)).contiguous()


def unsplit(x: Tensor, axis: TensorAxis, site: str) -> Tensor:
    """Makes a stream that is cut in time whole, and its gradient too."""
    axis.check_stream(x, site, whole=False)
    return cast(Tensor, cast(Any, Gather).apply(x, axis, 1, axis.length, site))
