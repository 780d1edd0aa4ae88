"""Forwards as users write them: views, writes in place, shared and tied weights, containers, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Lin(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)


class Child(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.child = nn.Linear(c, c)


class Two(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c)


class Weight(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c))


class Residual(nn.Module):
    """x plus what one module makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlaceOnView(Lin):
    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        h[:, 0] = 0
        h[..., :1].mul_(2)
        return x + h


class InPlaceSum(Lin):
    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        h += x
        return h


class Attention(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Convolution(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
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


class CustomFunction(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.w)


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


class Position(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1, 1, c))

    def forward(self, size: torch.Size) -> Tensor:
        return self.p.expand(size)


class ReturnsParameter(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.position = Position(c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position(x.shape)


class ReadsChild(Child):
    """A parent that reads its child's weight and never calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.child.weight.t(), self.child.bias)


class TiedInside(nn.Module):
    """Down is up, transposed."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(c, c), nn.Linear(c, c)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
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


class Teacher(nn.Module):
    """A frozen module under no_grad beside one that learns."""

    def __init__(self, inner: nn.Module, c: int) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(c, c), inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) * target.sigmoid()


class Buffers(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1, c))
        self.register_buffer("unsaved", torch.ones(c), persistent=False)
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.scale) + self.unsaved


class Lists(nn.Module):
    """Parameters in lists and dicts, a scalar, one without elements, one that is never used, one that is frozen."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.ones(c), torch.ones(c, c)])
        self.dict = nn.ParameterDict({"a": torch.ones(()), "b": torch.ones(1, 3)})
        self.none = nn.Parameter(torch.ones(0, c))
        self.unused = nn.Parameter(torch.ones(2, 5))
        self.frozen = nn.Parameter(torch.ones(c), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.list[0] + x @ self.list[1] * self.dict["a"] + self.dict["b"].sum() * self.frozen
        return torch.cat([x, self.none.expand(x.shape[0], -1, -1)], 1)


class Transposed(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c + 1, c).t())

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.w)[..., 1:].sin()


class HalfWide(Weight):
    """A parameter of another dtype."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.narrow = nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w + self.narrow.to(x.dtype)


class Recurrent(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.gru = nn.GRU(c, c, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class Functional(Child):
    """``functional_call`` with the child's own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.functional_call(self.child, dict(self.child.named_parameters()), (x,))


class Energy(Lin):
    """The gradient of an energy with respect to the input, as scores are."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.lin(x).tanh().square().sum()
            (score,) = torch.autograd.grad(energy, x, create_graph=torch.is_grad_enabled())
        return x - 0.1 * score


class Iterates(Lin):
    """As often as the data says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + len(x) % 2):
            x = x + self.lin(x).tanh()
        return x


class Hooked(nn.Module):
    """Hooks that change what goes in and comes out."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin, self.gain = nn.Linear(c, c), nn.Parameter(torch.ones(c))
        self.lin.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.lin.register_forward_hook(lambda module, args, out: out.tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.lin(x)


class Detached(Two):
    """Weights read without a gradient beside weights read with one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x) + F.linear(x, self.b.weight.detach()) + self.b(x).detach()


class Penalty(Lin):
    """A term of the weights, which grows with the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (1 + self.lin.weight.square().mean())


class Spectral(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.fft = nn.Parameter(torch.ones(c // 2 + 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.fft, n=x.shape[-1])


class Patched(Lin):
    """Its forward stands in the instance."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.lin.forward = lambda x, lin=self.lin: F.linear(x, lin.weight * 2, lin.bias)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x)


class Copied(Two):
    """Two modules that hold one storage in two parameters."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).tanh())


class NotInTurn(nn.Module):
    """Children that run in another order than they are listed in, one of them not at all."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(c, c) for name in ("z", "idle", "a")})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["z"](self.layers["a"](x).tanh())


class Alternates(Two):
    """Reads one of two children, by the sign of what comes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a(x) if len(x) and float(x.detach()[0].sum()) > 0 else self.b(x)) if len(x) == 1 else self.a(x)
