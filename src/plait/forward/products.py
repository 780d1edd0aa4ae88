"""A handler for backwards in two parts: first the gradient of a stage's input, later those of its weights.

    F    forward, on *stand-ins*: one leaf per microbatch and parameter, which shares the parameter's memory
    I    the caller's backward: the input's gradient; a linear weight's product waits with its stand-in
    W    each parameter receives its gradient as in a plain backward, hooks and all

Between F, I and W of a microbatch, those of other microbatches may run in any order: F0 F1 F2 I0 F3 I1 W0 I2 W1 ...

The weight products of ``F.linear`` wait.  Autograd computes every other gradient (norms, embeddings, convolutions) in
I, and it waits on its stand-in.  Three kinds of calls are left to torch: those under autocast, which adds up the
gradients of a weight's uses in the lower precision; those with subclasses of tensors; and those that are recomputed
unseen (in a checkpoint around a function that is no module's call), where torch would save other tensors.

The formulas are those of torch's own backward, to the bit: which operand is transposed, and the layout of a product,
decide the order in which a BLAS adds.

It does not see ``apply`` of an autograd.Function: code that passes a parameter to one asks for its ``stand_in``.

Source: zero bubble pipeline parallelism (Qi et al. 2023, arXiv:2401.10241).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from plait.forward.context import CurrentForward
from plait.forward.interceptor import Function, Handler
from plait.tensor import CutWeight
from plait.tensor.no_double_backward import no_double_backward
from plait.torch_private import DisableTorchFunction, are_functorch_transforms_active, will_engine_execute_node

DENSE = (Tensor, nn.Parameter)
Later = list[Callable[[], Tensor]]
"""Functions that compute the gradients of a weight's uses, which are added in this order."""

first_order = no_double_backward("a schedule that splits backwards", "choose another order (1f1b)")


class Products(Handler):
    """Runs forwards on stand-ins, and the weight part of their backwards.

    A forward whose context has ``stand_ins`` (an empty dict when it begins) fills them for those of the stage's
    ``parameters`` that are not frozen.  Where ``stand_ins`` is None, the backward comes in one piece.
    """

    def __init__(self, current: CurrentForward, parameters: Iterable[nn.Parameter]) -> None:
        self.current = current
        self.parameters: Mapping[int, nn.Parameter] = {id(p): p for p in parameters if p.requires_grad}

    def weigh(self, stand_ins: dict[int, Tensor]) -> None:
        """Runs the weight part: computes the gradients and gives them to the parameters, those used last first.  It
        empties ``stand_ins``, those of the microbatch's context, and reads no parameter's values.  A parameter with no
        gradient in the input part gets none.  Raises ValueError where activations were written to since."""
        nodes = []
        with DisableTorchFunction(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            for key in list(stand_ins):
                stand_in: Any = stand_ins.pop(key)
                waiting = stand_in if isinstance(stand_in, list) else stand_in.waiting  # a list for a cut weight
                if waiting is not stand_in and stand_in.grad is not None:
                    waiting.append(partial(_itself, stand_in.grad))
                    stand_in.grad = None
                if waiting:
                    nodes.append(cast(Any, WeightGradNode).apply(self.parameters[key], waiting))
            torch.autograd.backward(nodes)

    def stand_in(self, parameter: Tensor) -> Tensor:
        """Returns the running microbatch's replacement for a parameter; anything else is returned as it is."""
        stand_ins, key = self.current.context.stand_ins, id(parameter)
        if stand_ins is None or key not in self.parameters or not torch.is_grad_enabled():
            return parameter
        if isinstance(parameter, CutWeight):  # its products wait in a list
            return parameter
        if key not in stand_ins:
            with DisableTorchFunction(), temporarily_clear_interpreter_stack():  # whole also under vmap
                leaf: Any = parameter.detach().requires_grad_(parameter.requires_grad)
                leaf.waiting = Later()
                stand_ins[key] = leaf
        return stand_ins[key]

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        waits = False
        if self.current.context.stand_ins is not None and torch.is_grad_enabled():
            waits = id(kwargs.get("weight", args[1] if len(args) > 1 else None)) in self.parameters
            args = self._replaced(args)
            kwargs = {name: self._replaced(argument) for name, argument in kwargs.items()}
        if waits and func is F.linear and self.current.comes_back and plain(*args, **kwargs):
            with DisableTorchFunction():
                if (result := linear(*args, **kwargs)) is not None:
                    return result
        return call_next(*args, **kwargs)

    def _replaced(self, argument: Any) -> Any:
        """Returns an argument with its parameters replaced by stand-ins, also in lists and tuples."""
        if id(argument) in self.parameters:
            return self.stand_in(argument)
        if type(argument) in (list, tuple):
            return type(argument)(map(self._replaced, argument))
        return argument


def plain(input: Any, *others: Any, **named: Any) -> bool:
    """True if this handler may compute a product of these: torch's own dense tensors, without autocast, which adds in
    its own way, and without ``torch.func`` (vmap, grad), which refuses functions without rules for its transforms."""
    for x in (input, *others, *named.values()):
        if isinstance(x, Tensor) and (type(x) not in DENSE or x.layout is not torch.strided or x.is_nested):
            return False
    device = input.device.type if isinstance(input, Tensor) else "cpu"
    return not torch.is_autocast_enabled(device) and not are_functorch_transforms_active()


class WeightGradNode(torch.autograd.Function):
    """The node of W that gives a parameter its gradient: the sum of the gradients in ``waiting``, in order."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, waiting: Later) -> Tensor:
        ctx.waiting = waiting
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.waiting.pop(0)()  # and its operands are freed
        while ctx.waiting:
            gradient = gradient + ctx.waiting.pop(0)()
        return gradient, None


def _itself(gradient: Tensor) -> Tensor:
    return gradient


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear``, [..., in] -> [..., out], in the same steps as torch; returns None to leave it to torch.

    Gradients of a stand-in wait with it; others are computed in backward.
    """
    x = input
    if not x.dim() or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    apply: Callable[..., Tensor] = Linear.apply
    if x.dim() == 2:
        return apply(x, weight, bias, _waiting(weight), _waiting(bias))
    fused = bias if x.is_contiguous() else None
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = apply(rows, weight, fused, _waiting(weight), _waiting(fused)).view(*x.shape[:-1], weight.shape[0])
    return y if bias is fused or bias is None else y + bias


def _waiting(parameter: Tensor | None) -> Later | None:
    found: Later | None = getattr(parameter, "waiting", None)
    return found


class Linear(torch.autograd.Function):
    """y = x W^T + b of matrices; the gradients of W and b are computed now, or later by functions in ``later``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *later: Later | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.later, ctx.by_rows = later, weight.stride() == (weight.shape[1], 1)
        ctx.x_by_columns = x.stride() == (1, x.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        if wants_x:
            dx = (weight.t() @ g.t()).t() if ctx.x_by_columns else g @ weight
        if wants_weight:
            dw = _made(ctx, 0, partial(_weight_gradient, ctx.by_rows), g, x)
        if wants_bias:
            db = _made(ctx, 1, partial(torch.sum, dim=0), g)
        return dx, dw, db, None, None


def _made(ctx: Any, place: int, make: Callable[..., Tensor], *operands: Tensor) -> Tensor | None:
    """Computes a gradient now, or leaves a function in ``later`` for W; operands must not be written to meanwhile."""
    later: Later | None = ctx.later[place]
    if later is None or not _reaches(ctx.next_functions[1 + place][0]):
        return make(*operands)
    kept = [(operand.detach(), operand._version) for operand in operands]

    def make_later() -> Tensor:
        if any(operand._version != version for operand, version in kept):
            raise ValueError(
                f"an operand of a weight gradient (tensors of shapes {', '.join(str([*x.shape]) for x, _ in kept)}) "
                f"was written to between the input part and the weight part of a microbatch's backward: activations "
                f"and their gradients are read until the weight part is over; copy a tensor before you write to it"
            )
        return make(*(operand for operand, _ in kept))

    later.append(make_later)
    return None


def _reaches(node: Any) -> bool:
    """True if the running backward gives a stand-in its gradient; False in the program's ``torch.autograd.grad``."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # its gradient was asked for by name
        return False


def _weight_gradient(by_rows: bool, g: Tensor, x: Tensor) -> Tensor:
    return g.t() @ x if by_rows else (x.t() @ g).t()
