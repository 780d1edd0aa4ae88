"""Models that are written only by accident: a seed draws one.

Every part takes and returns ``(B, T, C)`` in fp64, and works sample by sample, so that samples may be dealt to ranks
and microbatches in any way.  ``PARTS`` lists them all; a part that holds other parts is in ``NESTING``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import odd_parts as odd
import parts
import torch
from torch import Tensor, nn

VOCABULARY = 11


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
    "mlp": lambda c: parts.Residual(
        nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 2 * c + 1), nn.GELU(), nn.Linear(2 * c + 1, c))
    ),
    "in_place_on_view": parts.InPlaceOnView,
    "in_place_sum": parts.InPlaceSum,
    "attention": parts.Attention,
    "convolution": parts.Convolution,
    "custom_function": parts.CustomFunction,
    "returns_parameter": parts.ReturnsParameter,
    "reads_child": parts.ReadsChild,
    "tied_inside": parts.TiedInside,
    "dict": lambda c: parts.TakesData(c, "dict"),
    "tuple": lambda c: parts.TakesData(c, "tuple"),
    "data": lambda c: parts.TakesData(c, "data"),
    "list": lambda c: parts.TakesData(c, "list"),
    "experts": lambda c: parts.Experts(c, 3, always=False),
    "all_experts": lambda c: parts.Experts(c, 2, always=True),
    "buffers": parts.Buffers,
    "lists": parts.Lists,
    "transposed": parts.Transposed,
    "half_wide": parts.HalfWide,
    "recurrent": parts.Recurrent,
    "functional": parts.Functional,
    "energy": parts.Energy,
    "iterates": parts.Iterates,
    "hooked": parts.Hooked,
    "detached": parts.Detached,
    "penalty": parts.Penalty,
    "spectral": parts.Spectral,
    "patched": parts.Patched,
    "copied": parts.Copied,
    "not_in_turn": parts.NotInTurn,
    "alternates": parts.Alternates,
    "weight_norm": weight_norm,
    "heads": heads,
    "encoder": lambda c: nn.TransformerEncoderLayer(c, 1, 2 * c, dropout=0.0, batch_first=True, norm_first=True),
    "rms": lambda c: nn.RMSNorm(c),
    "sums": odd.Sums,
    "by_method": odd.ByMethod,
    "calls_forward": odd.CallsForward,
    "quantized": odd.Quantized,
    "auxiliary": odd.Auxiliary,
    "mapped": odd.Mapped,
    "complex": odd.Complex,
    "hooked_gradients": odd.HookedGradients,
    "pairs": odd.Pairs,
    "written": odd.Written,
    "remembers": odd.Remembers,
    "reentrant": odd.ReentrantCheckpoint,
    "grouped": odd.Grouped,
    "functions": odd.Functions,
    "autocast": odd.Autocast,
    "orthogonal": lambda c: torch.nn.utils.parametrizations.orthogonal(nn.Linear(c, c)),
    "old_weight_norm": lambda c: torch.nn.utils.weight_norm(nn.Linear(c, c)),
    "bilinear": lambda c: parts.Residual(nn.Sequential(nn.Linear(c, 2 * c), nn.GLU(), nn.Tanh())),
}

NESTING: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "residual": lambda inner, c: parts.Residual(inner),
    "checkpointed": lambda inner, c: parts.Checkpointed(inner),
    "twice": lambda inner, c: parts.Twice(inner),
    "teacher": parts.Teacher,
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


def drawn(seed: int, at_least: int = 1) -> Drawn:
    """The seed's model; each build gives the same values, all of them distinct."""
    draw = random.Random(seed)
    c, tokens = draw.choice([4, 6, 7]), draw.random() < 0.6
    plain = [[draw.choice(list(PARTS))] for _ in range(draw.randint(at_least, 4))]
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
