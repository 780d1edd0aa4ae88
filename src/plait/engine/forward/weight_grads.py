"""The backward of a stage in two parts, a handler: the gradient of its input now, those of its weights later.

    F    forward, on *stand-ins*: one leaf per microbatch and parameter, which shares the parameter's memory
    I    the caller's backward: the input's gradient; a weight's lands on its stand-in, the large products deferred
    W    deferred products are made, and each parameter receives its gradient as in a plain backward, hooks and all

Between F, I and W of a microbatch those of others may run, in any order: F0 F1 F2 I0 F3 I1 W0 I2 W1 ...

Deferred are the products of ``deferred_products`` with a parameter as weight.  Every other gradient (norms,
``weight.t()``, recurrent kernels, the inside of a multi-head attention) is made by autograd in I and waits on its
stand-in.  So is everything under autocast, which adds up the gradients of a weight's uses in the lower precision, and
what is recomputed unseen (a checkpoint around a function that is no module's call), where torch would save other
tensors than these products do.

It sees every function of the forward that reads a parameter which trains.  It does not see ``apply`` of an
autograd.Function: whoever passes a parameter to one asks for its ``stand_in``.

Source: zero bubble pipeline parallelism (Qi et al. 2023, arXiv:2401.10241).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.forward.context import CurrentForward
from plait.engine.forward.deferred_products import DEFERRED, linear, value
from plait.engine.forward.interceptor import Function, Handler
from plait.tensor_parallel.gemm import TORCH, Gemm


class WeightGrads(Handler):
    """Forwards on stand-ins, and the weight part of their backwards.

    A forward whose context has ``stand_ins`` (an empty dict when it begins) fills them, for the stage's parameters that
    are not frozen; one that has None is left alone: its backward comes in one piece.
    """

    def __init__(self, current: CurrentForward, parameters: Iterable[nn.Parameter], gemm: Gemm = TORCH) -> None:
        self.current = current
        self._deferred: Mapping[Any, Callable[..., Tensor | None]] = {**DEFERRED, F.linear: partial(linear, gemm=gemm)}
        self.parameters: Mapping[int, nn.Parameter] = {id(p): p for p in parameters if p.requires_grad}

    def weigh(self, stand_ins: dict[int, Tensor]) -> None:
        """The weight part: make the gradients and give them to the parameters, those used last first.

        It empties ``stand_ins``, those of the microbatch's context, and reads no parameter's values.  A parameter that
        got no gradient in the input part gets none.  ValueError where activations were written to since.
        """
        nodes = []
        with torch._C.DisableTorchFunction(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            for key in list(stand_ins):
                stand_in = stand_ins.pop(key)
                if stand_in.grad is not None:
                    nodes.append(cast(Any, WeightGradNode).apply(self.parameters[key], [stand_in.grad]))
                    stand_in.grad = None
            torch.autograd.backward(nodes)

    def stand_in(self, parameter: Tensor) -> Tensor:
        """What the running microbatch has in place of a parameter; anything else is returned as it is."""
        stand_ins, key = self.current.context.stand_ins, id(parameter)
        if stand_ins is None or key not in self.parameters or not torch.is_grad_enabled():
            return parameter
        if key not in stand_ins:
            with torch._C.DisableTorchFunction():
                stand_ins[key] = parameter.detach().requires_grad_()
        return stand_ins[key]

    def idle(self) -> bool:
        return self.current.context.stand_ins is None

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        if self.idle() or not torch.is_grad_enabled():
            return call_next(*args, **kwargs)
        ours = func in DEFERRED and self.current.comes_back
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None) if ours else None
        args = self._replaced(args)
        kwargs = {name: self._replaced(argument) for name, argument in kwargs.items()}
        if id(weight) in self.parameters and plain(kwargs.get("input", args[0] if args else None)):
            with torch._C.DisableTorchFunction():
                if (result := self._deferred[func](*args, **kwargs)) is not None:
                    return result
        return call_next(*args, **kwargs)

    def _replaced(self, argument: Any) -> Any:
        """An argument with stand-ins for its parameters, also in lists and tuples."""
        if id(argument) in self.parameters:
            return self.stand_in(argument)
        if type(argument) in (list, tuple):
            return type(argument)(map(self._replaced, argument))
        return argument


def plain(x: Any) -> bool:
    """Whether products of x are ours: a dense tensor of torch's own, no autocast, which has its own way to add, and no
    ``torch.func`` (vmap, grad), which takes no function without rules for each of its transforms."""
    dense = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_nested
    return dense and not torch.is_autocast_enabled(x.device.type) and not torch._C._are_functorch_transforms_active()


class WeightGradNode(torch.autograd.Function):
    """The node of W that gives a parameter its gradient, the only element of ``waiting``, computed."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, waiting: list[Tensor]) -> Tensor:
        ctx.waiting = waiting
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = value(ctx.waiting.pop())  # and what it was made of is freed
        return gradient, None
