"""What goes from link to link and no pipeline can carry: refused by name, never computed without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import distinct
from pipeline_cases import refused
from test_crossing import Biased, Tower
from torch import Tensor, nn


class Deciding(Tower):
    """Asks the embedding whether to go on."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scale = 2.0 if x.sum() > 0 else 1.0
        for block in self.blocks:
            x = block(x) * scale
        out: Tensor = self.head(self.norm(x))
        return out


class Noting(Tower):
    """Blocks write into a list of the model's."""

    class Block(Biased):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
            seen.append(x.square().mean())
            return super().forward(x)

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.embed(x), list[Tensor]()
        for block in self.blocks:
            x = block(x, seen)
        out: Tensor = self.head(self.norm(x)) + torch.stack(seen).sum()
        return out


class Hooked(Tower):
    """Collects from its blocks by hooks that the first forward adds, as transformers does for router logits."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for _, child in self.blocks.named_children():
            for _ in child.named_children():
                child.register_forward_hook(lambda module, args, out: seen.append(out))
        return super().forward(x) + sum(one.square().mean() for one in seen)


class Hidden(Tower):
    """Returns a thing that only this process knows."""

    class Block(Biased):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), object()

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Overwriting(Tower):
    """Writes to what the embedding made, and has it again behind the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        first *= 2
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x + first))
        return out


class Elsewhere(Tower):
    """Calls its norm by a name that its source does not show."""

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, "nor" + "m")(self.embed(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    "kind, words",
    [
        (Deciding, "asks for numbers by '__bool__'"),
        (Noting, r"'blocks\.\d' writes into a list or a dict"),
        (Hooked, r"the modules inside of 'blocks\.\d' belongs to another stage"),
        (Hidden, "stage 0 ends with 'blocks.2', which returns object"),
        (Overwriting, "loss_fn uses something .* which another stage has"),
        (Elsewhere, "'norm' belongs to no link of the pipeline and was taken to run elsewhere, but stage 0 calls it"),
    ],
)
@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=3"])
def test_what_cannot_cross_is_refused_by_name(kind: type[nn.Module], words: str, mesh: str) -> None:
    refused(words.replace("blocks.2", "blocks." + ("2" if mesh == "pipe=2" else "1")), distinct(kind()), mesh)
