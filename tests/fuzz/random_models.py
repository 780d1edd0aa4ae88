"""Models that nobody would write on purpose, and everybody has written by accident: a seed draws one.

Every part takes and returns ``(B, T, C)`` in fp64, and works sample by sample, so that samples may be dealt to ranks
and microbatches in any way.  ``PARTS`` lists them all; a part that holds other parts is in ``NESTING``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11


class Residual(nn.Module):
    """x plus what one module makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlaceOnView(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        h[:, 0] = 0
        h[..., :1].mul_(2)
        return x + h


class InPlaceSum(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

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


class CustomFunction(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.w)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

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


class ReadsChild(nn.Module):
    """A parent that reads its child's weight and never calls it."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.child = nn.Linear(c, c)

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


class HalfWide(nn.Module):
    """A parameter of another dtype."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c))
        self.narrow = nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w + self.narrow.to(x.dtype)


class Recurrent(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.gru = nn.GRU(c, c, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class Functional(nn.Module):
    """``functional_call`` with the child's own parameters."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.child = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.functional_call(self.child, dict(self.child.named_parameters()), (x,))


class Energy(nn.Module):
    """The gradient of an energy with respect to the input, as scores are."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.lin(x).tanh().square().sum()
            (score,) = torch.autograd.grad(energy, x, create_graph=torch.is_grad_enabled())
        return x - 0.1 * score


class Iterates(nn.Module):
    """As often as the data says."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

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


class Detached(nn.Module):
    """Weights read without a gradient beside weights read with one."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x) + F.linear(x, self.b.weight.detach()) + self.b(x).detach()


class Penalty(nn.Module):
    """A term of the weights, which grows with the samples."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (1 + self.lin.weight.square().mean())


class Spectral(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.fft = nn.Parameter(torch.ones(c // 2 + 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.fft, n=x.shape[-1])


class Patched(nn.Module):
    """Its forward stands in the instance."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)
        self.lin.forward = lambda x, lin=self.lin: F.linear(x, lin.weight * 2, lin.bias)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x)


class Copied(nn.Module):
    """Two modules that hold one storage in two parameters."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c)
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


class Alternates(nn.Module):
    """Reads one of two children, by the sign of what comes."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a(x) if len(x) and float(x.detach()[0].sum()) > 0 else self.b(x)) if len(x) == 1 else self.a(x)


class Sums(nn.Module):
    """Reads all its parameters in one loop, before its children run."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = sum(p.square().mean() for p in self.parameters())
        return self.b(self.a(x)) / (1 + total)


class ByMethod(nn.Module):
    """Its child's own method is called, not the child."""

    class Coder(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(c, c), nn.Parameter(torch.ones(c))

        def encode(self, x: Tensor) -> Tensor:
            return self.up(x)

        def decode(self, x: Tensor) -> Tensor:
            return x * self.down

    def __init__(self, c: int) -> None:
        super().__init__()
        self.coder = self.Coder(c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.coder.decode(self.coder.encode(x).tanh())


class CallsForward(nn.Module):
    """``child.forward(x)``: no hook runs."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.child = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.child.forward(x)


class Quantized(nn.Module):
    """A straight-through estimator on the weight."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        w = self.lin.weight
        return x + F.linear(x, w + ((w * 8).round() / 8 - w).detach(), self.lin.bias)


class Auxiliary(nn.Module):
    """Leaves a term of the loss in an attribute, which the loss collects."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        self.auxiliary = 0.01 * h.square().sum()
        return x + h.tanh()


class Mapped(nn.Module):
    """A parameter under vmap."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c, c))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda sample: sample + torch.tanh(sample @ self.w))(x)


class Complex(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c, dtype=torch.complex128))
        self.index = nn.Parameter(torch.arange(c).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).abs()[..., self.index]


class HookedGradients(nn.Module):
    """Hooks on a parameter's, an activation's and a module's gradients."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)
        self.lin.weight.register_hook(lambda g: g * 0.5)
        self.lin.register_full_backward_hook(lambda module, into, out: (into[0] * 2,) if into[0] is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.7)
        return x + h


class Pairs(nn.Module):
    """Two streams from child to child."""

    class Pair(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.lin = nn.Linear(c, c)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            a, b = pair
            return b, a + self.lin(b).tanh()

    def __init__(self, c: int) -> None:
        super().__init__()
        self.pairs = nn.Sequential(self.Pair(c), self.Pair(c))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.pairs((x, x.cos()))
        return a + b


class Written(nn.Module):
    """A parameter that its forward writes."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-0.3, 0.3)
        return x + self.lin(x)


class Remembers(nn.Module):
    """A child in a list that torch does not know."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)
        self.hidden = [self.lin.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.hidden[0]


class ReentrantCheckpoint(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(c, c), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True) if x.requires_grad else self.inner(x)


class Grouped(nn.Module):
    """Norms without running statistics, over channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(1, c), nn.InstanceNorm1d(c, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.instance(self.group(x.transpose(1, 2))).transpose(1, 2)


class Functions(nn.Module):
    """``torch.func.grad`` in a forward."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda z: (z * self.w).sin().sum())(x)


class Autocast(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + self.lin(x)


def weight_norm(c: int) -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(c, c))


def heads(c: int) -> nn.Module:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(c, 1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    return Heads()


PARTS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda c: nn.Sequential(nn.Linear(c, c), nn.ReLU(inplace=True)),
    "mlp": lambda c: Residual(
        nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 2 * c + 1), nn.GELU(), nn.Linear(2 * c + 1, c))
    ),
    "in_place_on_view": InPlaceOnView,
    "in_place_sum": InPlaceSum,
    "attention": Attention,
    "convolution": Convolution,
    "custom_function": CustomFunction,
    "returns_parameter": ReturnsParameter,
    "reads_child": ReadsChild,
    "tied_inside": TiedInside,
    "dict": lambda c: TakesData(c, "dict"),
    "tuple": lambda c: TakesData(c, "tuple"),
    "data": lambda c: TakesData(c, "data"),
    "list": lambda c: TakesData(c, "list"),
    "experts": lambda c: Experts(c, 3, always=False),
    "all_experts": lambda c: Experts(c, 2, always=True),
    "buffers": Buffers,
    "lists": Lists,
    "transposed": Transposed,
    "half_wide": HalfWide,
    "recurrent": Recurrent,
    "functional": Functional,
    "energy": Energy,
    "iterates": Iterates,
    "hooked": Hooked,
    "detached": Detached,
    "penalty": Penalty,
    "spectral": Spectral,
    "patched": Patched,
    "copied": Copied,
    "not_in_turn": NotInTurn,
    "alternates": Alternates,
    "weight_norm": weight_norm,
    "heads": heads,
    "encoder": lambda c: nn.TransformerEncoderLayer(c, 1, 2 * c, dropout=0.0, batch_first=True, norm_first=True),
    "rms": lambda c: nn.RMSNorm(c),
    "sums": Sums,
    "by_method": ByMethod,
    "calls_forward": CallsForward,
    "quantized": Quantized,
    "auxiliary": Auxiliary,
    "mapped": Mapped,
    "complex": Complex,
    "hooked_gradients": HookedGradients,
    "pairs": Pairs,
    "written": Written,
    "remembers": Remembers,
    "reentrant": ReentrantCheckpoint,
    "grouped": Grouped,
    "functions": Functions,
    "autocast": Autocast,
    "orthogonal": lambda c: torch.nn.utils.parametrizations.orthogonal(nn.Linear(c, c)),
    "old_weight_norm": lambda c: torch.nn.utils.weight_norm(nn.Linear(c, c)),
    "bilinear": lambda c: Residual(nn.Sequential(nn.Linear(c, 2 * c), nn.GLU(), nn.Tanh())),
}

NESTING: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "residual": lambda inner, c: Residual(inner),
    "checkpointed": lambda inner, c: Checkpointed(inner),
    "twice": lambda inner, c: Twice(inner),
    "teacher": Teacher,
    "sequential": lambda inner, c: nn.Sequential(inner, nn.Linear(c, c), nn.Tanh()),
    "module_list": lambda inner, c: nn.Sequential(nn.ModuleDict({"x": inner})["x"], nn.Identity()),
}


class Model(nn.Module):
    """Tokens or vectors in, parts in turn, a head; perhaps tied, or with a skip to the head."""

    def __init__(self, parts: list[nn.Module], c: int, tokens: bool, tied: bool, skip: bool, chain: str) -> None:
        super().__init__()
        self.inlet = nn.Embedding(VOCABULARY, c, padding_idx=0) if tokens else nn.Linear(4, c)
        self.blocks = nn.Sequential(*parts) if chain == "sequential" else nn.ModuleList(parts)
        self.norm = nn.LayerNorm(c)
        self.head = nn.Linear(c, VOCABULARY, bias=False)
        if tied and tokens:
            self.head.weight = self.inlet.weight
        self.skip, self.chain = skip, chain

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.inlet(x)
        if isinstance(self.blocks, nn.Sequential):
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block.forward(x) if self.chain == "forward" else block(x)
        return self.head(self.norm(x + first if self.skip else x))


@dataclass(frozen=True)
class Drawn:
    """A model as it was drawn: its parts by name, and how to build it."""

    parts: tuple[str, ...]
    tokens: bool
    build: Callable[[], nn.Module]


def drawn(seed: int) -> Drawn:
    """The seed's model; each build gives the same values, all of them distinct."""
    draw = random.Random(seed)
    c, tokens = draw.choice([4, 6, 7]), draw.random() < 0.6
    plain = [[draw.choice(list(PARTS))] for _ in range(draw.randint(1, 4))]
    for names in plain:
        while draw.random() < 0.3:
            names.append(draw.choice(list(NESTING)))
    tied, skip, chain = draw.random() < 0.4, draw.random() < 0.2, draw.choice(["sequential", "list"] * 5 + ["forward"])
    frozen = draw.choice([0, 0, 0, 0.3])

    def build() -> nn.Module:
        parts = []
        torch.manual_seed(seed)  # of buffers
        for name, *around in plain:
            part = PARTS[name](c)
            for outer in around:
                part = NESTING[outer](part, c)
            parts.append(part)
        model = Model(parts, c, tokens, tied, skip, chain).double()
        generator = torch.Generator().manual_seed(seed)
        thaw = random.Random(seed)
        for parameter in model.parameters():
            if thaw.random() < frozen:
                parameter.requires_grad_(False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dtype.is_floating_point or parameter.is_complex():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
                if name.endswith("narrow"):
                    parameter.data = parameter.data.float()
        return model

    return Drawn(
        (
            "/".join("+".join(names) for names in plain),
            f"c={c}",
            *[w for w, on in {"tokens": tokens, "tied": tied, "skip": skip, chain: True}.items() if on],
        ),
        tokens,
        build,
    )
