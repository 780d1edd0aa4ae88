"""Products whose input gradient is made in backward and whose weight gradient is made when it is asked for.

    forward      y = x W^T          x and W are saved
    backward     dx = g W           now: the stage before waits for it
                 dW = g^T x         a ``DeferredGrad`` of the shape of W: what to do, and with which g and x

A ``DeferredGrad`` goes through autograd as the gradient that it stands for: autograd adds it to others in its usual
order, and the sum is deferred too, so nothing has to be known of who else uses the weight.  Any other function of a
deferred gradient computes it and goes on with its value.

The formulas are those of torch's own backward, to the bit: which operand is transposed, and in which layout a product
is made, decides the order in which a BLAS adds (``tensor.gemm`` says which BLAS).  ``linear``, ``embedding``
and ``convolution`` return None for cases that they leave to torch, weight gradient and all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.tensor.gemm import TORCH, Gemm
from plait.tensor.no_double_backward import no_double_backward

aten = torch.ops.aten
first_order = no_double_backward(
    "gemm='onednn', or a schedule that splits backwards,", "leave gemm out, and choose another order (1f1b)"
)

LAZY = {aten.add.Tensor, aten.detach.default}
"""What autograd itself does to gradients, by sums and by the tensors that it keeps: the result is deferred too."""


class Form(NamedTuple):
    """What a tensor is, apart from its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form_of(x: Tensor) -> Form:
    return Form(x.shape, x.stride(), x.dtype, x.device)


class DeferredGrad(Tensor):
    """A gradient that is not computed yet: ``make(*operands)``, which is of this form.  Operands, which may be deferred
    themselves, are kept without their graphs and must not be written to meanwhile."""

    make: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @staticmethod
    def __new__(cls, make: Callable[..., Tensor], operands: Sequence[Tensor], form: Form) -> Self:
        shape, strides, dtype, device = form
        gradient = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        gradient.make = make
        gradient.operands = tuple(t if isinstance(t, DeferredGrad) else t.detach() for t in operands)
        gradient.versions = tuple(t._version for t in gradient.operands)
        return gradient

    def __init__(self, make: Callable[..., Tensor], operands: Sequence[Tensor], form: Form) -> None: ...

    def compute(self) -> Tensor:
        """The gradient; ValueError where an operand was written to since."""
        if self.versions != tuple(t._version for t in self.operands):
            raise ValueError(
                f"what a weight gradient {list(self.shape)} is made of was written to between the input part and the "
                f"weight part of a microbatch's backward: its activations and their gradients are read until the "
                f"weight part is over; copy a tensor before you write to it"
            )
        return self.make(*map(value, self.operands))

    def settle(self) -> Tensor:
        """The gradient, computed once and from here on always the same tensor: what is written to it is not lost."""
        made = self.compute()
        self.make, self.operands, self.versions = lambda: made, (), ()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in LAZY and not kwargs and len({form_of(t) for t in args if isinstance(t, Tensor)}) == 1:
            return cls(func, args, form_of(args[0]))
        return func(*map(_settled, args), **{k: _settled(v) for k, v in (kwargs or {}).items()})


def value(gradient: Any) -> Any:
    """A deferred gradient computed; anything else as it is."""
    return gradient.compute() if isinstance(gradient, DeferredGrad) else gradient


def _settled(gradient: Any) -> Any:
    return gradient.settle() if isinstance(gradient, DeferredGrad) else gradient


def _apply(function: Any, *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


def _save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Keep what backward reads: x if the weight wants a gradient, and the weight's values if x wants one."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
    ctx.weight, ctx.bias = form_of(weight), None if bias is None else form_of(bias)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, gemm: Gemm = TORCH, later: bool = True
) -> Tensor | None:
    """``F.linear``, [..., in] -> [..., out], in the steps that torch takes; ``later``: gradients of weight and bias are
    deferred, otherwise they are made in backward."""
    x = input
    if not x.dim() or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    if x.dim() == 2:
        return _apply(Linear, x, weight, bias, gemm, later)
    fused = bias if x.is_contiguous() else None
    rows = _apply(Linear, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, fused, gemm, later)
    y = rows.view(*x.shape[:-1], weight.shape[0])
    return y if bias is fused or bias is None else y + bias


class Linear(torch.autograd.Function):
    """y = x W^T + b of matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, later: bool) -> Tensor:
        _save(ctx, x, weight, bias)
        ctx.gemm, ctx.make = gemm, DeferredGrad if later else _made
        ctx.x_by_columns = x.stride() == (1, x.shape[0])
        return gemm.linear(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        product = ctx.gemm.product
        dx = dw = db = None
        if wants_x:
            dx = product(weight.t(), g.t()).t() if ctx.x_by_columns else product(g, weight)
        if wants_weight:
            dw = ctx.make(partial(_weight_gradient, product, ctx.weight), (g, x), ctx.weight)
        if wants_bias:
            db = ctx.make(partial(torch.sum, dim=0), (g,), ctx.bias)
        return dx, dw, db, None, None


def _made(make: Callable[..., Tensor], operands: Sequence[Tensor], form: Form) -> Tensor:
    return make(*operands)


def _weight_gradient(product: Callable[[Tensor, Tensor], Tensor], weight: Form, g: Tensor, x: Tensor) -> Tensor:
    by_rows = weight.strides == (weight.shape[1], 1)
    return product(g.t(), x) if by_rows else product(x.t(), g).t()


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """``F.embedding``, int [...] -> [..., width]."""
    rows = weight.shape[0]
    if max_norm is not None or scale_grad_by_freq or sparse or not -rows <= (padding_idx or 0) < rows:
        return None
    return _apply(Embedding, input, weight, -1 if padding_idx is None else padding_idx % rows)


class Embedding(torch.autograd.Function):
    """y = W[indices]; the row ``padding_idx`` gets no gradient (-1: every row does)."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        _save(ctx, indices, weight, None)
        ctx.padding_idx = padding_idx
        return torch.embedding(weight, indices, padding_idx)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None
        make = partial(_sum_by_index, ctx.weight.shape[0], ctx.padding_idx)
        return None, DeferredGrad(make, (g, ctx.saved_tensors[0]), ctx.weight), None


def _sum_by_index(rows: int, padding_idx: int, g: Tensor, indices: Tensor) -> Tensor:
    return cast(Tensor, aten.embedding_dense_backward(g, indices, rows, padding_idx, False))


Sizes = int | Sequence[int]


def convolution(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor | None:
    """``F.conv1d``, ``F.conv2d`` and ``F.conv3d``: [batch, channels, *space], or without batch."""
    x, strides, dilations = input, _each(stride, dims), _each(dilation, dims)
    pads = _padding(padding, [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=False)], strides)
    if pads is None or weight.dim() != dims + 2 or x.dim() not in (dims + 1, dims + 2):
        return None
    window = (strides, pads, dilations, False, [0] * dims, groups)
    y = _apply(Convolution, x if x.dim() == dims + 2 else x[None], weight, bias, window)
    return y if x.dim() == dims + 2 else y.squeeze(0)


def _each(sizes: Sizes, dims: int) -> list[int]:
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    return sizes * dims if len(sizes) == 1 else sizes


def _padding(padding: Sizes | str, reach: list[int], strides: list[int]) -> list[int] | None:
    """On both sides of each dim, in which the window's last element is ``reach`` from its first; None where ``same``
    pads the sides differently, or is refused by torch."""
    if not isinstance(padding, str):
        return _each(padding, len(reach))
    if padding == "same" and set(strides) == {1} and not any(r % 2 for r in reach):
        return [r // 2 for r in reach]
    return [0] * len(reach) if padding == "valid" else None


class Convolution(torch.autograd.Function):
    """A convolution; ``window`` is what torch's convolution takes after the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: tuple[Any, ...]) -> Tensor:
        _save(ctx, x, weight, bias)
        ctx.window = window
        return torch.convolution(x, weight, bias, *window)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        bias_shape = None if ctx.bias is None else list(ctx.bias.shape)
        dx = db = None
        if wants_x:
            dx, *_ = aten.convolution_backward(g, x, weight, bias_shape, *ctx.window, [True, False, False])
        # One call makes both of the others, as in torch: kernels sum the bias along with the product.
        both = cache(partial(_products, ctx.weight, bias_shape, ctx.window, wants_bias))
        dw = DeferredGrad(lambda *operands: both(*operands)[0], (g, x), ctx.weight)
        if wants_bias:
            db = DeferredGrad(lambda *operands: both(*operands)[1], (g, x), ctx.bias)
        return dx, dw, db, None


def _products(
    weight: Form, bias_shape: list[int] | None, window: tuple[Any, ...], wants_bias: bool, g: Tensor, x: Tensor
) -> list[Tensor]:
    """The gradients of a weight and, if it wants one, of its bias.  The weight's values are not read."""
    unread = torch.empty_strided(weight.shape, weight.strides, dtype=weight.dtype, device=weight.device)
    mask = [False, True, wants_bias]
    return list(aten.convolution_backward(g, x, unread, bias_shape, *window, mask)[1:])


DEFERRED: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.conv1d: partial(convolution, 1),
    F.conv2d: partial(convolution, 2),
    F.conv3d: partial(convolution, 3),
}
"""The torch functions whose weight gradient can wait; their second argument is the weight."""
