"""Values that go from link to link and that no pipeline can carry are refused by name, never left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossing_cases import Biased, Tower
from engine_cases import distinct
from pipeline_cases import linear, refused
from torch import Tensor, nn


class Deciding(Tower):
    """Asks the embedding whether to go on."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scale = 2.0 if x.sum() > 0 else 1.0
        for block in self.blocks:
            x = block(x) * scale
        return self.head(self.norm(x))


class Noting(Tower):
    """Blocks write into a list of the model's."""

    class Block(Biased):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(x.square().mean())
            return super().forward(x)

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.embed(x), list[Tensor]()
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x)) + torch.stack(seen).sum()


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
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), object()

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


class Overwriting(Tower):
    """Writes to the embedding's output, and reads it again after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        first *= 2
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


class Elsewhere(Tower):
    """Calls its norm by a name that its source does not show."""

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, "nor" + "m")(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(Tower):
    """A module in front of the blocks returns something beside its tensor, which is read behind them."""

    class Embed(nn.Module):
        calls = 0

        def __init__(self, made: Callable[[Tensor, int], Any]) -> None:
            super().__init__()
            self.inner, self.made = linear(), made

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.inner(x), self.made(x, self.calls)

    def __init__(self, made: Callable[[Tensor, int], Any], read: Callable[[Any], Any] = lambda found: found) -> None:
        super().__init__()
        self.embed, self.read = self.Embed(made), read

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.read(found)


class Numbers:
    """A thing that only this process knows."""

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * 3


def number() -> nn.Module:
    return Counting(lambda x, calls: 0.5 if x[0, 0] > 0 else 0.25)


def once() -> nn.Module:
    """It becomes another thing after microbatches of two sizes."""
    return Counting(lambda x, calls: 2 if calls < 3 else Numbers())


def kept() -> nn.Module:
    """It is a tensor, of which the length is read."""
    return Counting(lambda x, calls: x[x[:, 0] > 0], len)


class SparseBias(Tower):
    """A sparse tensor that is made between blocks is given to all."""

    class Block(Biased):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return super().forward(x, bias.to_dense())

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        bias = x.detach().to_sparse()
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "kind, words",
    [
        (Deciding, "'__bool__' reads a value of another stage"),
        (Noting, r"'blocks\.\d' writes into a list or a dict"),
        (Hooked, r"the modules inside of 'blocks\.\d' belongs to another stage"),
        (Hidden, "stage 0 ends with 'blocks.2', which returns object"),
        (number, r"'embed' returns .*0\.2?5.* where it returned .* for an earlier batch .*, or return .* as a tensor"),
        (once, "'embed', whose earlier result later stages know, returns Numbers: from stage to stage go"),
        (kept, r"'embed' returns .*float64 \[\d, 5\].* where it returned .*float64 \[\d, 5\].* pad what varies"),
        (SparseBias, r"an argument of 'blocks\.\d' is read after .*, and is a sparse_coo tensor"),
        (Overwriting, "loss_fn, or the model after its links, uses a value of another stage"),
        (Elsewhere, "'norm' belongs to no link of the pipeline and was taken to run elsewhere, but stage 0 calls it"),
    ],
)
@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=3"])
def test_what_cannot_cross_is_refused_by_name(kind: Callable[[], nn.Module], words: str, mesh: str) -> None:
    refused(words.replace("blocks.2", "blocks." + ("2" if mesh == "pipe=2" else "1")), distinct(kind()), mesh)
