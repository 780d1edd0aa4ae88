"""Embedding and cross-entropy over a vocabulary that is cut over the tensor axis.

    embedding       a rank looks up the tokens that it holds, and zeros for others; the sum over the ranks is the row
    cross-entropy   largest and log Σ exp of my classes, target's logit if it is mine   all_gather [ranks, 3, tokens]
                    loss = log Σ exp of all - the target's logit                        the same on every rank
                    gradient = my softmax, scaled to the whole one, - 1 at my target    nothing is sent

No rank ever holds the logits of all classes.  Source: Megatron-LM (Shoeybi et al. 2019), section 3, which reduces
maximum, sum and target separately.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm import Comm
from plait.table.collectives import Note
from plait.table.region import part
from plait.table.tensor_plan import FORWARD
from plait.tensor.axis import AXES, Gather, Leave, TensorAxis, first_order
from plait.tensor.linear import put_off, token, values
from plait.tensor.metadata import name_of, only_metadata
from plait.torch_private import DisableTorchFunctionSubclass, assert_async, tree_leaves

LOSS = Note(FORWARD, "loss")
"""The ledger's name for the messages of a cross-entropy."""

aten = torch.ops.aten


CutClasses = tuple[Tensor, int, Comm, tuple[str, ...]]
"""Logits cut in classes: this rank's part, the number of all classes, and the axes that cut them."""


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """Cross-entropy in nats, summed over the ``targets`` that are not ``ignored``: a scalar, never a mean.

    Args:
        logits: [..., classes], a plain tensor, or one whose classes (and nothing else) are cut: the logits of a cut
            head, or a ``ShardedTensor``. Then three numbers per target are gathered.
        targets: int64 [...], whole.
        ignored: the target that does not count.

    Returns:
        A plain scalar, the same on every rank, from which every rank calls backward; fp32, or fp64 if the logits are.

    Raises:
        ValueError: logits that are cut in another dim, or with a sum pending.
        IndexError: a target that is no class.
    """
    if not hasattr(logits, "cut_classes"):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum")
    local, classes, comm, axes = cast(CutClasses, logits.cut_classes())
    start, _ = part(classes, comm.mesh.count(axes), comm.mesh.index(comm.rank, axes))
    local = local.flatten(0, -2)
    local = local if local.dtype == torch.float64 else local.float()
    check_range(targets[targets != ignored], classes, "targets")
    loss: Tensor = CutCrossEntropy.apply(local, targets.flatten(), start, ignored, comm, axes)
    return loss


class CutLogits(Tensor):
    """This rank's classes of logits [..., classes]: it has the whole shape, and this rank's values.

    Cross-entropy takes it, and so do functions that treat each class by itself or reshape the other dims.  Any other
    function (argmax, softmax) would take a part for the whole and raises; ``full()`` gathers.
    """

    axis: TensorAxis
    classes: int
    site: str

    @classmethod
    def of(cls, local: Tensor, axis: TensorAxis, classes: int, site: str) -> Self:
        """Returns the logits whose part on this rank is ``local``."""
        logits = local.as_subclass(cls)
        logits.axis, logits.classes, logits.site = axis, classes, site
        return logits

    @property
    def local(self) -> Tensor:
        """[..., classes of this rank], a plain tensor."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((*self.local.shape[:-1], self.classes))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def full(self) -> Tensor:
        """Returns the logits of all classes, plain: an all_gather."""
        local = self.local
        return cast(Tensor, Gather.apply(local, self.axis, local.dim() - 1, self.classes, self.site))

    def cut_classes(self) -> CutClasses:
        return self.local, self.classes, self.axis.comm, AXES

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CutLogits({list(self.shape)}, classes cut over {self.axis.ways} tensor ranks)"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        logits = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, CutLogits))
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        reads = name in ("dim", "ndimension", "is_floating_point", "__hash__", "backward", "register_hook")
        if reads or (name == "__get__" and only_metadata(func)):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        others = [x for x in args if x is not logits and isinstance(x, Tensor) and x.dim()]
        if name in RESHAPES:
            args = (logits, *_with_local(args[1:], logits))
        cuts = not _keeps_classes(args[1], logits) if name == "__getitem__" else bool(others)
        if cuts or name not in CLASSWISE | RESHAPES:
            raise ValueError(
                f"{name_of(func)!r} on logits whose {logits.classes} classes are cut over {logits.axis.ways} tensor "
                f"ranks would take a part for the whole: compute the loss by F.cross_entropy or "
                f"plait.cross_entropy_sum, which take them as they are, or gather them first (logits.full())"
            )
        with DisableTorchFunctionSubclass():
            result = func(*(x.as_subclass(Tensor) if isinstance(x, CutLogits) else x for x in args), **kwargs)
            if result.dim() == 0 or result.size(-1) != logits.as_subclass(Tensor).size(-1):
                raise ValueError(
                    f"{name!r} cuts or mixes the classes of logits that are cut: gather them (logits.full())"
                )
            return cls.of(result, logits.axis, logits.classes, logits.site)


CLASSWISE = {
    *("float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach", "requires_grad_", "tanh", "neg"),
    *("mul", "__mul__", "__rmul__", "mul_", "div", "__truediv__", "div_", "true_divide", "add", "__add__", "__radd__"),
    *("sub", "__sub__", "clamp", "__getitem__", "flatten", "unsqueeze", "squeeze", "__imul__", "__itruediv__"),
}
"""Functions that treat each class by itself, if their other arguments are numbers."""

RESHAPES = {"view", "reshape"}


def _keeps_classes(index: Any, logits: CutLogits) -> bool:
    """True for an index that takes all classes of each entry that it takes."""
    *before, last = index if isinstance(index, tuple) else (index,)
    if isinstance(last, slice) and last == slice(None):
        return True
    items = before if last is Ellipsis else [*before, last]
    taken = [i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in items if i is not None]
    return not any(i is Ellipsis for i in items) and sum(taken) < logits.dim()


def _with_local(sizes: Sequence[Any], logits: CutLogits) -> list[int]:
    """The sizes of a new shape, with this rank's number of classes as its last dim."""
    flat = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else list(sizes)
    if flat and flat[-1] in (logits.classes, -1):
        flat[-1] = logits.local.size(-1)
    return flat


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of [tokens, classes] over cut classes."""
    if weight is not None or label_smoothing or reduction not in ("sum", "mean") or input.dim() > 2:
        raise ValueError(
            "F.cross_entropy over cut classes takes [tokens, classes], reduction 'sum' or 'mean', and neither weight "
            "nor label_smoothing: gather the logits first (logits.full())"
        )
    total = cross_entropy_sum(input, target, ignore_index)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def check_range(values: Tensor, size: int, what: str) -> None:
    """Raises IndexError for a value outside 0..size-1, as the whole table would (on a GPU, when the check runs)."""
    if values.device.type != "cpu":
        assert_async(((values >= 0) & (values < size)).all())
    elif values.numel() and not (int(values.min()) >= 0 and int(values.max()) < size):
        raise IndexError(f"{what} from {int(values.min())} to {int(values.max())}: the vocabulary is 0 to {size - 1}")


def embedding(
    tokens: Tensor, weight: Tensor, size: int, padding: int | None, axis: TensorAxis, site: str, *, whole: bool = False
) -> Tensor:
    """Looks up rows of a table of ``size`` rows, cut over the ranks; the row of ``padding`` gets no gradient.

    ``tokens`` are int64 of any shape, [batch, time] under sequence parallelism.  The result [..., width] is whole, or
    cut in time under sequence parallelism unless ``whole``.  Raises IndexError for a token that has no row.
    """
    check_range(tokens, size, "tokens")
    start, _ = axis.part(size)
    scatter = axis.sequence and not whole
    if scatter:
        axis.length = tokens.size(1)
    waits = weight.requires_grad and torch.is_grad_enabled() and axis.later(weight) is not None
    padding = -1 if padding is None else padding - start
    x = Lookup.apply(tokens - start, token(weight) if waits else weight, (weight,), axis, padding)
    return cast(Tensor, Leave.apply(x, axis, site, scatter))


class Lookup(torch.autograd.Function):
    """Looks up rows of this rank's part of a table, zeros for other tokens.  ``edge`` as in ``linear.Row``."""

    @staticmethod
    def forward(ctx: Any, here: Tensor, edge: Tensor, weight: tuple[Tensor], axis: TensorAxis, padding: int) -> Tensor:
        table = values(weight[0])
        ctx.rows = held = table.size(0)
        elsewhere = (here < 0) | (here >= held)
        here = here.masked_fill(elsewhere, 0)
        ctx.save_for_backward(here, elsewhere)
        ctx.axis, ctx.weight, ctx.padding = axis, weight[0], padding if 0 <= padding < held else -1
        return torch.embedding(table, here).masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        here, elsewhere = ctx.saved_tensors
        gradient = gradient.masked_fill(elsewhere[..., None], 0)

        def make() -> Tensor:
            return cast(Tensor, aten.embedding_dense_backward(gradient, here, ctx.rows, ctx.padding, False))

        return None, None if put_off(ctx.axis, ctx.weight, make) else make(), None, None, None


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
        shares = logits.softmax(1)
        numbers = logits.new_zeros(3, num_tokens)  # my largest, log Σ exp(logit - largest), my target's logit
        if classes:
            largest, place = logits.max(1, keepdim=True)
            numbers[0] = largest.squeeze(1)
            torch.neg(shares.gather(1, place).squeeze(1).log(), out=numbers[1])
            none = numbers[0].isneginf()  # all my classes are minus infinity
            shares[none], numbers[1, none] = 0, 0
        else:
            numbers[0] = float("-inf")
        numbers[2, rows] = logits[rows, columns]
        of_ranks = numbers.new_empty(comm.mesh.count(axes), 3, num_tokens)
        comm.all_gather(of_ranks, numbers, axes, note=LOSS).wait()
        top = of_ranks[:, 0].amax(0)
        log_sums = of_ranks[:, 0] - top + of_ranks[:, 1]  # relative to the largest of all, where they are exact
        whole = log_sums.logsumexp(0)
        of_whole = (numbers[0] - top + numbers[1] - whole).exp()
        ctx.save_for_backward(counts, rows, columns, of_whole, shares)
        return ((whole - (of_ranks[:, 2].sum(0) - top)) * counts).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        counts, rows, columns, of_whole, shares = ctx.saved_tensors  # torch refuses a second read after a write
        shares.mul_((of_whole * counts * gradient)[:, None])
        shares[rows, columns] -= gradient
        return shares, None, None, None, None, None
