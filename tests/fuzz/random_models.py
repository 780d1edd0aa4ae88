"""Models that are written only by accident: a seed draws one.

Every part takes and returns ``(B, T, C)`` in fp64, and works sample by sample, so that samples may be dealt to ranks
and microbatches in any way.  ``PARTS`` lists them all; a part that holds other parts is in ``NESTING``.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import parts
import torch
from odd_parts import PARTS
from torch import Tensor, nn

VOCABULARY = 11


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
