"""The backward of a stage in two parts: the gradient of its input now, those of its weights later.

    F    forward, on *stand-ins*: one leaf per microbatch and parameter, which shares the parameter's memory
    I    the caller's backward: the input's gradient; a weight's lands on its stand-in, the large products pending
    W    pending products are made, and each parameter receives its gradient as in a plain backward, hooks and all

Between F, I and W of a microbatch those of others may run, in any order: F0 F1 F2 I0 F3 I1 W0 I2 W1 ...

The products that wait are those of ``plait.engine.deferred_products``: linear layers, embeddings, convolutions with a
parameter as weight.  Every other gradient (norms, ``weight.t()``, recurrent kernels, the inside of a multi-head
attention) is made by autograd in I and waits on its stand-in.  So is everything under autocast, which adds up the
gradients of a weight's uses in the lower precision: that sum is autocast's own; and what is recomputed out of sight (a
checkpoint around a function that is no module's call), where torch would save other tensors than these products do.

A function mode sees every torch function of the forward.  It does not see ``apply`` of an autograd.Function: whoever
hands a parameter to one asks for its ``stand_in``.

Source: zero bubble pipeline parallelism (Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.engine.deferred_products import DEFERRED, linear, value
from plait.engine.rng import Streams
from plait.engine.watch import reads
from plait.tensor.gemm import TORCH, Gemm


class Deferred(TorchFunctionMode):
    """Forwards on stand-ins, and the weight part of their backwards; on while the stage's forward runs.

    Off in backward, but for a forward that is recomputed there: ``resume`` says whose backward it is.  It sees
    functions after the modes that are entered later, which still meet the parameters themselves.

    Args:
        parameters: the stage's parameters; those that are frozen are left alone.
        gemm: multiplies the matrices of linear layers.
        streams: know whether what runs now is seen again where it is recomputed; None: it is.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], gemm: Gemm = TORCH, streams: Streams | None = None) -> None:
        super().__init__()
        self._streams = streams
        self._deferred: Mapping[Any, Callable[..., Tensor | None]] = {**DEFERRED, F.linear: partial(linear, gemm=gemm)}
        self._parameters = {id(p): p for p in parameters if p.requires_grad}
        self._stand_ins: dict[int, dict[int, Tensor]] = {}
        """By microbatch, then by ``id`` of the parameter, in the order of first use."""
        self._running: dict[int, Tensor] | None = None
        self._idle = False

    def begin(self, microbatch: int | None) -> None:
        """The forward of a microbatch begins; what a step that failed may have left of it is forgotten.

        Args:
            microbatch: None for one whose backward comes in one piece: nothing stands in for anything.
        """
        self._idle = microbatch is None
        self._running = None
        if microbatch is not None:
            self._running = self._stand_ins[microbatch] = {}

    def resume(self, microbatch: int) -> None:
        """The input part of a microbatch's backward begins: what it recomputes belongs to it.

        Raises:
            ValueError: a microbatch that has no forward behind it.
        """
        self._idle, self._running = False, self._of(microbatch)

    def weigh(self, microbatch: int) -> None:
        """The weight part: make the gradients and hand them to the parameters, those used last first.

        Reads no parameter's values.  A parameter that got no gradient in the input part gets none.

        Raises:
            ValueError: a microbatch that has no forward behind it, or whose activations were written to since.
        """
        stand_ins = self._of(microbatch)
        del self._stand_ins[microbatch]
        if self._running is stand_ins:
            self._running = None
        with torch._C.DisableTorchFunction(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(
                [
                    cast(Any, Weigh).apply(self._parameters[key], held)
                    for key, stand_in in stand_ins.items()
                    if (held := _taken_from(stand_in))
                ]
            )

    def stand_in(self, parameter: Tensor) -> Tensor:
        """What the running microbatch has in place of a parameter; anything else is returned as it is.

        Raises:
            ValueError: no microbatch runs.
        """
        key = id(parameter)
        if self._idle or key not in self._parameters or not torch.is_grad_enabled():
            return parameter
        if self._running is None:
            raise ValueError("a forward ran outside of every microbatch: call begin(microbatch) before it")
        if key not in self._running:
            with torch._C.DisableTorchFunction():
                self._running[key] = parameter.detach().requires_grad_()
        return self._running[key]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._idle or not torch.is_grad_enabled() or not reads(func, args, kwargs, self._parameters):
            return func(*args, **kwargs)
        ours = func in DEFERRED and (self._streams is None or self._streams.comes_back)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None) if ours else None
        args = self._replaced(tuple(args))
        kwargs = {name: self._replaced(argument) for name, argument in kwargs.items()}
        if id(weight) in self._parameters and plain(kwargs.get("input", args[0] if args else None)):
            with torch._C.DisableTorchFunction():
                if (result := self._deferred[func](*args, **kwargs)) is not None:
                    return result
        return func(*args, **kwargs)

    def _replaced(self, argument: Any) -> Any:
        """An argument with stand-ins for its parameters, also in lists and tuples."""
        if id(argument) in self._parameters:
            return self.stand_in(argument)
        if type(argument) in (list, tuple):
            return type(argument)(map(self._replaced, argument))
        return argument

    def _of(self, microbatch: int) -> dict[int, Tensor]:
        if microbatch not in self._stand_ins:
            raise ValueError(
                f"microbatch {microbatch} has no forward behind it (those that have: {sorted(self._stand_ins)}): "
                f"call begin({microbatch}) before its forward, and weigh it once"
            )
        return self._stand_ins[microbatch]


def plain(x: Any) -> bool:
    """Whether products of x are ours: a dense tensor of torch's own, and no autocast, which has its own way to add.

    Nor are those inside ``torch.func`` (vmap, grad), which takes no function without rules for each of its transforms.
    """
    dense = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_nested
    return dense and not torch.is_autocast_enabled(x.device.type) and not torch._C._are_functorch_transforms_active()


def _taken_from(stand_in: Tensor) -> list[Tensor]:
    """The gradient of a stand-in, which has it no more; nothing if it has none."""
    gradient, stand_in.grad = stand_in.grad, None
    return [] if gradient is None else [gradient]


class Weigh(torch.autograd.Function):
    """The node of W that hands a parameter its gradient, alone in ``held``, computed."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, held: list[Tensor]) -> Tensor:
        ctx.held = held
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = value(ctx.held.pop())  # what it was made of goes
        return gradient, None
