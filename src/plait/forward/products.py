"""Who multiplies, and when, a handler: by another ``Gemm`` than torch's own, and a backward in two parts.

``F.linear`` is carried out by ``deferred_products`` with the run's ``Gemm``.  Where the schedule says so, the gradient
of a stage's input is made now, and those of its weights later:

    F    forward, on *stand-ins*: one leaf per microbatch and parameter, which shares the parameter's memory
    I    the caller's backward: the input's gradient; a weight's lands on its stand-in, the large products deferred
    W    deferred products are made, and each parameter receives its gradient as in a plain backward, hooks and all

Between F, I and W of a microbatch those of others may run, in any order: F0 F1 F2 I0 F3 I1 W0 I2 W1 ...

Deferred are the products of ``deferred_products`` with a parameter as weight.  Every other gradient (norms,
``weight.t()``, recurrent kernels, the inside of a multi-head attention) is made by autograd in I and waits on its
stand-in.  Left to torch, forward and all, is what autocast computes, which adds up the gradients of a weight's uses in
the lower precision; subclasses of tensors; and what is recomputed unseen (a checkpoint around a function that is no
module's call), where torch would save other tensors than these products do.

It does not see ``apply`` of an autograd.Function: whoever passes a parameter to one asks for its ``stand_in``.

Source: zero bubble pipeline parallelism (Qi et al. 2023, arXiv:2401.10241).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from plait.forward.context import CurrentForward
from plait.forward.deferred_products import DEFERRED, linear, value
from plait.forward.interceptor import Function, Handler
from plait.tensor import CutWeight
from plait.tensor.gemm import TORCH, Gemm

Product = Callable[..., Tensor | None]
DENSE = (Tensor, nn.Parameter)


class Products(Handler):
    """Products by ``gemm``; forwards on stand-ins, and the weight part of their backwards.

    A forward whose context has ``stand_ins`` (an empty dict when it begins) fills them, for those of the stage's
    ``parameters`` that are not frozen; where it has None, the backward comes in one piece.
    """

    def __init__(self, current: CurrentForward, gemm: Gemm, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.current = current
        self._deferred: Mapping[Any, Product] = {**DEFERRED, F.linear: partial(linear, gemm=gemm)}
        now = partial(linear, gemm=gemm, later=False)
        self._now: Mapping[Any, Product] = {} if gemm is TORCH else {F.linear: now}
        self.parameters: Mapping[int, nn.Parameter] = {id(p): p for p in parameters if p.requires_grad}

    def sees(self, func: Function) -> bool:
        return func in self._now

    def weigh(self, stand_ins: dict[int, Tensor]) -> None:
        """The weight part: make the gradients and give them to the parameters, those used last first.  It empties
        ``stand_ins``, those of the microbatch's context, and reads no parameter's values.  A parameter that got no
        gradient in the input part gets none.  ValueError where activations were written to since."""
        nodes = []
        with torch._C.DisableTorchFunction(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            for key in list(stand_ins):
                stand_in: Any = stand_ins.pop(key)
                if isinstance(stand_in, list):  # of a cut weight (see ``tensor.linear``)
                    waiting = stand_in
                else:
                    waiting = [] if stand_in.grad is None else [partial(value, stand_in.grad)]
                    stand_in.grad = None
                if waiting:
                    nodes.append(cast(Any, WeightGradNode).apply(self.parameters[key], waiting))
            torch.autograd.backward(nodes)

    def stand_in(self, parameter: Tensor) -> Tensor:
        """What the running microbatch has in place of a parameter; anything else is returned as it is."""
        stand_ins, key = self.current.context.stand_ins, id(parameter)
        if stand_ins is None or key not in self.parameters or not torch.is_grad_enabled():
            return parameter
        if isinstance(parameter, CutWeight):  # its products wait in a list
            return parameter
        if key not in stand_ins:
            with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():  # under vmap too a whole one
                stand_ins[key] = parameter.detach().requires_grad_(parameter.requires_grad)
        return stand_ins[key]

    def idle(self) -> bool:
        return not self._now and self.current.context.stand_ins is None

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        products = self._now
        if self.current.context.stand_ins is not None and torch.is_grad_enabled():
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            if func in self._deferred and id(weight) in self.parameters:
                products = self._deferred
            args = self._replaced(args)
            kwargs = {name: self._replaced(argument) for name, argument in kwargs.items()}
        if func in products and self.current.comes_back and plain(*args, **kwargs):
            with torch._C.DisableTorchFunction():
                if (result := products[func](*args, **kwargs)) is not None:
                    return result
        return call_next(*args, **kwargs)

    def _replaced(self, argument: Any) -> Any:
        """An argument with stand-ins for its parameters, also in lists and tuples."""
        if id(argument) in self.parameters:
            return self.stand_in(argument)
        if type(argument) in (list, tuple):
            return type(argument)(map(self._replaced, argument))
        return argument


def plain(input: Any, *others: Any, **named: Any) -> bool:
    """Whether a product of these is ours: of dense tensors of torch's own, no autocast, which has its own way to add,
    and no ``torch.func`` (vmap, grad), which takes no function without rules for each of its transforms."""
    for x in (input, *others, *named.values()):
        if isinstance(x, Tensor) and (type(x) not in DENSE or x.layout is not torch.strided or x.is_nested):
            return False
    device = input.device.type if isinstance(input, Tensor) else "cpu"
    return not torch.is_autocast_enabled(device) and not torch._C._are_functorch_transforms_active()


class WeightGradNode(torch.autograd.Function):
    """The node of W that gives a parameter its gradient: the sum of what ``waiting`` makes, in order."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, waiting: list[Callable[[], Tensor]]) -> Tensor:
        ctx.waiting = waiting
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.waiting.pop(0)()  # and what it was made of is freed
        while ctx.waiting:
            gradient = gradient + ctx.waiting.pop(0)()
        return gradient, None
