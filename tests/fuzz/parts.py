"""Forwards as users write them: views, writes in place, shared and tied weights, containers, experts.

``PARTS`` lists them by name, each with a function that builds one of a width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PARTS: dict[str, Callable[[int], nn.Module]] = {}


def part(then: Callable[[Any], object] = lambda module: None, **made: Callable[[int], Any]) -> Callable[[Any], Any]:
    """Lists a class whose forward follows.

    Args:
        then: what is done to a new module.
        made: children, parameters and buffers, each of a width.
    """

    def note(forward: Callable[..., Any]) -> type[nn.Module]:
        def build(self: nn.Module, c: int) -> None:
            nn.Module.__init__(self)
            for name, build in made.items():
                setattr(self, name, build(c))
            then(self)

        kind = type(forward.__name__, (nn.Module,), {"__init__": build, "forward": forward, "__module__": __name__})
        PARTS[forward.__name__] = kind
        return kind

    return note


def square(c: int) -> nn.Module:
    return nn.Linear(c, c)


def ones(c: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(c))


class Residual(nn.Module):
    """x plus what one module makes of it."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner[0] if len(inner) == 1 else nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Twice(nn.Module):
    """The same module in turn, and under two names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.one = self.other = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh())


class Teacher(nn.Module):
    """A frozen module under no_grad beside one that learns."""

    def __init__(self, inner: nn.Module, c: int) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(c, c), inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) * target.sigmoid()


PARTS["linear"] = lambda c: nn.Sequential(nn.Linear(c, c), nn.ReLU(inplace=True))
PARTS["mlp"] = lambda c: Residual(nn.LayerNorm(c), nn.Linear(c, 2 * c + 1), nn.GELU(), nn.Linear(2 * c + 1, c))


@part(lin=square)
def in_place_on_view(self: Any, x: Tensor) -> Tensor:
    h = self.lin(x)
    h[:, 0] = 0
    h[..., :1].mul_(2)
    return x + h


@part(lin=square)
def in_place_sum(self: Any, x: Tensor) -> Tensor:
    h = self.lin(x)
    h += x
    return h


@part(qkv=lambda c: nn.Linear(c, 3 * c, bias=False), out=square)
def attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@part(conv=lambda c: nn.Conv1d(c, c, 3, padding=1))
def convolution(self: Any, x: Tensor) -> Tensor:
    return x + self.conv(x.transpose(1, 2)).relu_().transpose(1, 2)


class Scaled(torch.autograd.Function):
    """x * w with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


@part(w=ones)
def custom_function(self: Any, x: Tensor) -> Tensor:
    return Scaled.apply(x, self.w)


class Position(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1, 1, c))

    def forward(self, size: torch.Size) -> Tensor:
        return self.p.expand(size)


@part(position=Position)
def returns_parameter(self: Any, x: Tensor) -> Tensor:
    return x + self.position(x.shape)


@part(child=square)
def reads_child(self: Any, x: Tensor) -> Tensor:
    """A parent that reads its child's weight and never calls it."""
    return x + F.linear(x, self.child.weight.t(), self.child.bias)


@part(lambda m: setattr(m.down, "weight", m.up.weight), up=square, down=square)
def tied_inside(self: Any, x: Tensor) -> Tensor:
    """Down is up, transposed."""
    return x + self.down(self.up(x).tanh())


@dataclass
class Out:
    hidden: Tensor
    extra: Tensor | None = None


class ReturnsData(nn.Module):
    def __init__(self, c: int, kind: str) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(c, c), kind

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        h = self.lin(x) * scale
        return {"dict": {"hidden": h, "none": None}, "tuple": (h, None, 3), "data": Out(h), "list": [h, [h.detach()]]}[
            self.kind
        ]


class TakesData(nn.Module):
    def __init__(self, c: int, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = ReturnsData(c, kind), kind

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, scale=0.5)
        h = {"dict": lambda: out["hidden"], "data": lambda: out.hidden}.get(self.kind, lambda: out[0])()
        return x + h


class Experts(nn.Module):
    """Each token goes to one expert; which experts run is in the data."""

    def __init__(self, c: int, num: int, always: bool) -> None:
        super().__init__()
        self.router = nn.Linear(c, num)
        self.experts = nn.ModuleList(nn.Linear(c, c) for _ in range(num))
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if self.always or mine.any():
                out[mine] = out[mine] + expert(x[mine]) * weights[mine][:, i : i + 1]
        return x + out


PARTS |= {kind: partial(TakesData, kind=kind) for kind in ("dict", "tuple", "data", "list")}
PARTS["experts"] = partial(Experts, num=3, always=False)
PARTS["all_experts"] = partial(Experts, num=2, always=True)


@part(
    scale=lambda c: nn.Buffer(torch.linspace(0.5, 1, c)),
    unsaved=lambda c: nn.Buffer(torch.ones(c), persistent=False),
    lin=square,
)
def buffers(self: Any, x: Tensor) -> Tensor:
    return self.lin(x * self.scale) + self.unsaved


@part(
    list=lambda c: nn.ParameterList([torch.ones(c), torch.ones(c, c)]),
    dict=lambda c: nn.ParameterDict({"a": torch.ones(()), "b": torch.ones(1, 3)}),
    none=lambda c: nn.Parameter(torch.ones(0, c)),
    unused=lambda c: nn.Parameter(torch.ones(2, 5)),
    frozen=lambda c: nn.Parameter(torch.ones(c), requires_grad=False),
)
def lists(self: Any, x: Tensor) -> Tensor:
    """Parameters in lists and dicts, a scalar, one without elements, one that is never used, one that is frozen."""
    x = x * self.list[0] + x @ self.list[1] * self.dict["a"] + self.dict["b"].sum() * self.frozen
    return torch.cat([x, self.none.expand(x.shape[0], -1, -1)], 1)


@part(w=lambda c: nn.Parameter(torch.ones(c + 1, c).t()))
def transposed(self: Any, x: Tensor) -> Tensor:
    """A parameter that is not contiguous."""
    return x + (x @ self.w)[..., 1:].sin()


@part(w=ones, narrow=ones)
def half_wide(self: Any, x: Tensor) -> Tensor:
    """A parameter of another dtype."""
    return x * self.w + self.narrow.to(x.dtype)


@part(gru=lambda c: nn.GRU(c, c, batch_first=True))
def recurrent(self: Any, x: Tensor) -> Tensor:
    return x + self.gru(x)[0]


@part(child=square)
def functional(self: Any, x: Tensor) -> Tensor:
    """``functional_call`` with the child's own parameters."""
    return x + torch.func.functional_call(self.child, dict(self.child.named_parameters()), (x,))


@part(lin=square)
def energy(self: Any, x: Tensor) -> Tensor:
    """The gradient of an energy with respect to the input, as scores are."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.lin(x).tanh().square().sum()
        (score,) = torch.autograd.grad(energy, x, create_graph=torch.is_grad_enabled())
    return x - 0.1 * score


@part(lin=square)
def iterates(self: Any, x: Tensor) -> Tensor:
    """As often as the data says."""
    for _ in range(1 + len(x) % 2):
        x = x + self.lin(x).tanh()
    return x


def hook(module: Any) -> None:
    module.lin.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    module.lin.register_forward_hook(lambda module, args, out: out.tanh())


@part(hook, lin=square, gain=ones)
def hooked(self: Any, x: Tensor) -> Tensor:
    """Hooks that change what goes in and comes out."""
    return x * self.gain + self.lin(x)


@part(a=square, b=square)
def detached(self: Any, x: Tensor) -> Tensor:
    """Weights read without a gradient beside weights read with one."""
    return x + self.a(x) + F.linear(x, self.b.weight.detach()) + self.b(x).detach()


@part(lin=square)
def penalty(self: Any, x: Tensor) -> Tensor:
    """A term of the weights, which grows with the samples."""
    return self.lin(x) * (1 + self.lin.weight.square().mean())


@part(fft=lambda c: ones(c // 2 + 1))
def spectral(self: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * self.fft, n=x.shape[-1])


def patch(module: Any) -> None:
    module.lin.forward = lambda x, lin=module.lin: F.linear(x, lin.weight * 2, lin.bias)


@part(patch, lin=square)
def patched(self: Any, x: Tensor) -> Tensor:
    """Its child's forward stands in the instance."""
    return x + self.lin(x)


@part(lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data)), a=square, b=square)
def copied(self: Any, x: Tensor) -> Tensor:
    """Two modules that hold one storage in two parameters."""
    return x + self.b(self.a(x).tanh())


@part(layers=lambda c: nn.ModuleDict({name: nn.Linear(c, c) for name in ("z", "idle", "a")}))
def not_in_turn(self: Any, x: Tensor) -> Tensor:
    """Children that run in another order than they are listed in, one of them not at all."""
    return self.layers["z"](self.layers["a"](x).tanh())


@part(a=square, b=square)
def alternates(self: Any, x: Tensor) -> Tensor:
    """Reads one of two children, by the sign of what comes."""
    return x + (self.a(x) if len(x) and float(x.detach()[0].sum()) > 0 else self.b(x)) if len(x) == 1 else self.a(x)


PARTS["weight_norm"] = lambda c: torch.nn.utils.parametrizations.weight_norm(nn.Linear(c, c))


@part(attention=lambda c: nn.MultiheadAttention(c, 1, batch_first=True))
def heads(self: Any, x: Tensor) -> Tensor:
    return x + self.attention(x, x, x, need_weights=False)[0]


PARTS |= {
    "encoder": lambda c: nn.TransformerEncoderLayer(c, 1, 2 * c, dropout=0.0, batch_first=True, norm_first=True),
    "rms": lambda c: nn.RMSNorm(c),
}
