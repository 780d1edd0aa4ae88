"""Runs of a model whose backward is in two parts, and of the same with a plain backward."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from plait.forward.context import CurrentForward
from plait.forward.interceptor import Interceptor
from plait.forward.products import Products

ORDER = "F0 F1 F2 I0 F3 I1 W0 I2 W2 W1 I3 W3"


class Deferring(Interceptor):
    """Forwards on stand-ins, microbatch by microbatch, as a stage makes them; on inside of ``with``."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        current = CurrentForward()
        self.handler = Products(current, parameters)
        super().__init__(current, [self.handler])
        self.stand_ins: dict[int, dict[int, Tensor]] = {}

    def begin(self, microbatch: int) -> None:
        """The forward of a microbatch begins."""
        self.stand_ins[microbatch] = {}
        self.resume(microbatch)

    def resume(self, microbatch: int) -> None:
        """Its input part begins."""
        self.current.begin(stand_ins=self.stand_ins[microbatch])

    def stand_in(self, parameter: Tensor) -> Tensor:
        """The running microbatch's stand-in for a parameter."""
        return self.handler.stand_in(parameter)

    def weigh(self, microbatch: int) -> None:
        """Its weight part."""
        self.handler.weigh(self.stand_ins.pop(microbatch))


def draws(x: Tensor, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)


def input_of(x: Tensor, wants_gradient: bool) -> Tensor:
    return x.clone().requires_grad_(wants_gradient and x.is_floating_point())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def grads(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if t.grad is None else t.grad.clone() for t in tensors]


def assert_equal(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"tensor {i}: {a} where {b} is right"
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"tensor {i} differs by up to {(a - b).abs().max()}"


def plain(model: nn.Module, inputs: Sequence[Tensor], order: str, wants: bool = True) -> list[Tensor | None]:
    """Outputs, input gradients and parameter gradients of plain backwards, in the order of the order's Ws."""
    model.zero_grad()
    xs, outputs = {}, {}
    for m in (int(word[1:]) for word in order.split() if word[0] == "W"):
        xs[m] = input_of(inputs[m], wants)
        outputs[m] = model(xs[m])
        outputs[m].backward(draws(outputs[m], m))
    ms = sorted(xs)
    return [*(outputs[m].detach() for m in ms), *grads([xs[m] for m in ms]), *grads(parameters_of(model))]


def split(
    model: nn.Module,
    inputs: Sequence[Tensor],
    order: str,
    wants: bool = True,
    between: Callable[[], object] = lambda: None,
) -> list[Tensor | None]:
    """The same in two parts; ``between`` is called after each I."""
    model.zero_grad()
    deferred = Deferring(model.parameters())
    xs, outputs, before = {}, {}, grads(parameters_of(model))
    for word in order.split():
        m = int(word[1:])
        if word[0] == "F":
            deferred.begin(m)
            xs[m] = input_of(inputs[m], wants)
            with deferred:
                outputs[m] = model(xs[m])
        elif word[0] == "I":
            deferred.resume(m)
            outputs[m].backward(draws(outputs[m], m))
            assert_equal(grads(parameters_of(model)), before)
            between()
        else:
            deferred.weigh(m)
            before = grads(parameters_of(model))
    assert not deferred.stand_ins
    ms = sorted(xs)
    return [*(outputs[m].detach() for m in ms), *grads([xs[m] for m in ms]), *before]


class Apply(nn.Module):
    """A function of the input and of parameters given one by one."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)
