"""Embedding and cross-entropy over a vocabulary that is cut over the tensor axis.

    embedding       a rank looks up the tokens that it holds, zeros for the others;  the sum over the ranks is the row
    cross-entropy   largest and log Σ exp of my classes, target's logit if it is mine   all_gather [ranks, 3, tokens]
                    loss = log Σ exp of all - the target's logit                        the same on every rank
                    gradient = my softmax, scaled to the whole one, - 1 at my target    nothing is sent

No rank ever holds the logits of all classes.  Source: Megatron-LM (Shoeybi et al. 2019), section 3, which reduces
maximum, sum and target apart.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm import Comm
from plait.sharded.networks import rows_held
from plait.sharded.sharded_tensor import ShardedTensor
from plait.table.collectives import Note
from plait.table.layout import part
from plait.table.tensor_plan import FORWARD
from plait.tensor.axis import Leave, TensorAxis, first_order

LOSS = Note(FORWARD, "loss")
"""How the ledger calls the messages of a cross-entropy."""


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """Cross-entropy in nats, summed over the ``targets`` that are not ``ignored``: a scalar, never a mean.

    Args:
        logits: [..., classes], a plain tensor, or a ``ShardedTensor`` whose classes (and nothing else) are cut: then
            three numbers per target are gathered.
        targets: int64 [...], whole.
        ignored: the target that does not count.

    Returns:
        A plain scalar, the same on every rank, from which every rank calls backward; fp32, or fp64 if the logits are.

    Raises:
        ValueError: logits that are cut in another dim, or with a sum pending.
        IndexError: a target that is no class.
    """
    if not isinstance(logits, ShardedTensor):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum")
    layout, comm = logits.sharding, logits.comm
    if any(layout.dims[:-1]) or layout.pending:
        raise ValueError(
            f"cross_entropy_sum on logits of layout '{layout}': only the classes, the last dim, may be cut; "
            f"redistribute the logits first"
        )
    axes = layout.dims[-1]
    start, _ = part(logits.shape[-1], comm.mesh.count(axes), comm.mesh.index(comm.rank, axes))
    local = logits.local.flatten(0, -2)
    local = local if local.dtype == torch.float64 else local.float()
    check_range(targets[targets != ignored], logits.shape[-1], "targets")
    loss: Tensor = CutCrossEntropy.apply(local, targets.flatten(), start, ignored, comm, axes)
    return loss


def check_range(values: Tensor, size: int, what: str) -> None:
    """Raises IndexError where a value is outside 0..size-1, as the whole table would (on a GPU, when it gets there)."""
    if values.device.type != "cpu":
        torch._assert_async(((values >= 0) & (values < size)).all())
    elif values.numel() and not (int(values.min()) >= 0 and int(values.max()) < size):
        raise IndexError(f"{what} from {int(values.min())} to {int(values.max())}: the vocabulary is 0 to {size - 1}")


def embedding(
    tokens: Tensor, weight: Tensor, size: int, padding: int | None, axis: TensorAxis, site: str, *, whole: bool = False
) -> Tensor:
    """Rows of a table of ``size`` rows, of which this rank has its part; the row of ``padding`` gets no gradient.

    ``tokens`` are int64 of any shape, [batch, time] under sequence parallelism; the result [..., width] is whole, or
    cut in time under sequence parallelism unless ``whole``.  Raises IndexError for a token that has no row.
    """
    check_range(tokens, size, "tokens")
    start, _ = axis.part(size)
    scatter = axis.sequence and not whole
    if scatter:
        axis.length = tokens.size(1)
    x: Tensor = Leave.apply(rows_held(tokens, weight, start, padding), axis, site, scatter)
    return x


class CutCrossEntropy(torch.autograd.Function):
    """``logits`` [tokens, classes of this rank], fp32 or fp64; ``targets`` [tokens]; ``start``: its first class."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, start: int, ignored: int, comm: Comm, axes: tuple[str, ...]
    ) -> Tensor:
        num_tokens, classes = logits.shape
        counts = targets != ignored
        here = targets - start
        mine = counts & (here >= 0) & (here < classes)
        rows, columns = mine.nonzero().squeeze(1), here[mine]
        ctx.shares = logits.softmax(1)
        numbers = logits.new_zeros(3, num_tokens)  # my largest, log Σ exp(logit - largest), my target's logit
        if classes:
            largest, place = logits.max(1, keepdim=True)
            numbers[0] = largest.squeeze(1)
            torch.neg(ctx.shares.gather(1, place).squeeze(1).log(), out=numbers[1])
            none = numbers[0].isneginf()  # all my classes are at minus infinity
            ctx.shares[none], numbers[1, none] = 0, 0
        else:
            numbers[0] = float("-inf")
        numbers[2, rows] = logits[rows, columns]
        of_ranks = numbers.new_empty(comm.mesh.count(axes), 3, num_tokens)
        comm.all_gather(of_ranks, numbers, axes, note=LOSS).wait()
        top = of_ranks[:, 0].amax(0)
        log_sums = of_ranks[:, 0] - top + of_ranks[:, 1]  # relative to the largest of all, where they are exact
        whole = log_sums.logsumexp(0)
        of_whole = (numbers[0] - top + numbers[1] - whole).exp()
        ctx.save_for_backward(counts, rows, columns, of_whole)
        return ((whole - (of_ranks[:, 2].sum(0) - top)) * counts).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        counts, rows, columns, of_whole = ctx.saved_tensors
        shares, ctx.shares = ctx.shares, None  # it becomes the gradient
        if shares is None:
            raise RuntimeError(
                "backward a second time through cross_entropy_sum, which keeps nothing for it: add the losses and call "
                "backward once"
            )
        shares.mul_((of_whole * counts * gradient)[:, None])
        shares[rows, columns] -= gradient
        return shares, None, None, None, None, None
