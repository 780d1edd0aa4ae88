"""``nn.SyncBatchNorm`` over the data axes of any world: each microbatch is normalised with all ranks' samples of it.

    forward    count, mean and squared deviations of each rank       one all-gather    mean and variance of all samples
    backward   sums of dy and of dy x̂ over all ranks                 one all-reduce    the gradient of the input

Ranks have weight by their samples; one without any takes part.  torch's own needs a process group and a GPU, and
otherwise normalises by rank in silence, so the engine gives every ``nn.SyncBatchNorm`` that it finds this forward.

Source: the variance is updated by parts as in Chan, Golub and LeVeque (1983).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.comm import Comm
from plait.table.agreement import DATA_ORDER
from plait.table.collectives import Note

NOTE = Note("normalise")


def synchronise(modules: Iterable[nn.Module], comm: Comm) -> None:
    """Gives every ``nn.SyncBatchNorm`` a forward over this world's data axes."""
    for module in modules:
        if isinstance(module, nn.SyncBatchNorm):  # changes the user's modules: see docs/guide/your-own-loop.md
            module.forward = partial(normalised, module, comm)  # type: ignore[method-assign]


def normalised(module: nn.SyncBatchNorm, comm: Comm, x: Tensor) -> Tensor:
    """The output of ``module`` for ``x``, [samples, channels, ...].

    Raises:
        ValueError: fewer than two values per channel on all ranks together.
    """
    if not module.training:
        return super(nn.SyncBatchNorm, module).forward(x)
    module._check_input_dim(x)
    given = x, module.weight, module.bias, module.eps, comm
    made: tuple[Tensor, Tensor, Tensor, Tensor] = Normalise.apply(*given)  # type: ignore[no-untyped-call]
    y, mean, variance, count = made
    if module.running_mean is not None and module.running_var is not None:
        with torch.no_grad():
            factor = module.momentum
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
                if factor is None:  # the mean of all batches so far
                    factor = 1 / float(module.num_batches_tracked)
            if factor is not None:
                module.running_mean.lerp_(mean.to(module.running_mean), factor)
                module.running_var.lerp_((variance * (count / (count - 1))).to(module.running_var), factor)
    return y


class Normalise(torch.autograd.Function):
    """The output; mean and (biased) variance of each channel, and the number of values in it, of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Comm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = values.transpose(0, 1).flatten(1)  # [channels, values]
        mean = rows.mean(1) if rows.size(1) else rows.new_zeros(rows.size(0))
        deviation = (rows - mean[:, None]).square().sum(1)
        mine = torch.cat([rows.new_tensor([rows.size(1)]), mean, deviation])
        table = mine.new_empty(comm.mesh.count(DATA_ORDER), len(mine))
        comm.all_gather(table, mine, DATA_ORDER, note=NOTE).wait()
        counts, means, deviations = table[:, :1], *table[:, 1:].chunk(2, 1)
        count = counts.sum()
        if count < 2:
            raise ValueError(
                f"{int(count)} values per channel on all ranks together: a SyncBatchNorm in training needs two or more"
            )
        mean = (counts * means).sum(0) / count
        variance = (deviations + counts * (means - mean).square()).sum(0) / count
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = (variance + eps).rsqrt()
        unit = (values - mean.view(shape)) * scale.view(shape)
        y = unit if weight is None else unit * weight.view(shape)
        y = y if bias is None else y + bias.view(shape)
        ctx.save_for_backward(unit, weight, scale, count)
        ctx.comm, ctx.shape = comm, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        unit, weight, scale, count = ctx.saved_tensors
        comm: Comm = ctx.comm
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        rest = [dim for dim in range(dy.dim()) if dim != 1]
        gradient = dy.to(unit.dtype)
        sums = torch.stack([gradient.sum(rest), (gradient * unit).sum(rest)])
        d_bias = sums[0].to(weight.dtype) if wants_bias else None
        d_weight = sums[1].to(weight.dtype) if wants_weight else None
        d_x = None
        if wants_x:
            everywhere = sums.clone()
            comm.all_reduce(everywhere, DATA_ORDER, note=NOTE).wait()
            by_mean, by_scale = (total.view(ctx.shape) / count for total in everywhere)
            factor = (scale if weight is None else scale * weight).view(ctx.shape)
            d_x = (factor * (gradient - by_mean - unit * by_scale)).to(dy.dtype)
        return d_x, d_weight, d_bias, None, None
