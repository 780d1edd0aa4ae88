"""Chains with split points, models whose later blocks read more than the stream, and layouts that cut them."""

from dataclasses import dataclass
from typing import Any

import engine_cases as cases
import pipeline_cases
import torch
from engine_cases import WIDTH, distinct
from pipeline_cases import linear
from torch import Tensor, nn


class Chain(pipeline_cases.Chain):
    """A chain with split points, which promises nothing of its blocks: the wing runs it, not the library."""

    pipeline_blocks = None

    def pipeline_links(self) -> list[str]:
        return [f"l{number}" for number in range(self.num_links)]


def chain(*links: nn.Module) -> Chain:
    """The links, or four unlike ones; every weight its own number."""
    return distinct(Chain(*(links or (linear(), nn.Tanh(), cases.Block(), linear()))))


BLOCKS = 6


class Tower(nn.Module):
    """An embedding, a list of blocks, a norm, a head; it says nothing of pipelines."""

    block: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.head = linear()  # the last to run is registered first
        self.embed = linear()
        self.blocks = nn.ModuleList(self.made(index) for index in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def made(self, index: int) -> nn.Module:
        made: nn.Module = (self.block or cases.Block)()
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Biased(nn.Module):
    """A block that is given another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x + torch.tanh(self.inner(x) if bias is None else self.inner(x) * bias)


class Masked(Tower):
    """A mask that is made of the input alone is made again on each stage."""

    block = Biased

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, bias=mask)
        return self.head(self.norm(x))


class Tuples(Tower):
    """Blocks return tuples, with None, a number and a NaN."""

    class Block(Biased):
        def forward(self, x: Tensor, seen: Tensor) -> Any:
            return super().forward(x), (None, 2, float("nan")), seen + 1

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.embed(x), torch.zeros(len(x), dtype=torch.int64)
        for block in self.blocks:
            x, (nothing, two, _), seen = block(x, seen)
            assert nothing is None
            x = x * two + seen[:, None]
        return self.head(self.norm(x))


@dataclass
class Stream:
    hidden: Tensor
    residual: Tensor | None = None


torch.export.register_dataclass(Stream, serialized_type_name="crossing_cases.Stream")


class Records(Tower):
    """Blocks return dicts and data classes in turn, with two tensors that train."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.kind = linear(), 0

        def forward(self, stream: Stream) -> Any:
            hidden = torch.tanh(self.inner(stream.hidden))
            residual = stream.hidden if stream.residual is None else stream.residual * 0.5 + hidden
            if self.kind == 0:
                return Stream(hidden, residual)
            return {"hidden": (hidden, ["a"]), "residual": residual}

    block = Block

    def made(self, index: int) -> nn.Module:
        made = super().made(index)
        made.kind = index % 2
        return made

    def forward(self, x: Tensor) -> Tensor:
        stream = Stream(self.embed(x))
        for block in self.blocks:
            made = block(stream)
            stream = made if isinstance(made, Stream) else Stream(made["hidden"][0], made["residual"])
        assert stream.residual is not None
        return self.head(self.norm(stream.hidden + stream.residual))


class Remembered(Tower):
    """Every block is given what the embedding and a table of the first stage made."""

    block = Biased

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(BLOCKS, WIDTH))
        self.project = linear()

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        biases = [self.project(first) + row for row in self.table]
        for i in range(BLOCKS):
            x = self.blocks[i](x, biases[i] if i % 2 else first)
        return self.head(self.norm(x))


class Carried(Tower):
    """All later blocks are given the output of the second one."""

    block = Biased

    def forward(self, x: Tensor) -> Tensor:
        x, second = self.embed(x), None
        for i, block in enumerate(self.blocks):
            x = block(x, second)
            second = x if i == 1 else second
        return self.head(self.norm(x))


class Between(Tower):
    """A weight and norms before and after each block; the second norm, for two stages, gets the model's input too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.norms = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(dropout)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.norms[1](x)) * self.gate
        for number, block in enumerate(self.blocks):
            x = self.norms[number // 2](x)
            x = x + self.norms[number // 2](block(x)) * self.gate
        return self.head(self.norm(x))


class Twice(Tower):
    """One norm before the blocks and behind them; the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks_of(self.norm(self.embed(x)))
        return self.head(self.norm(x)) + self.embed(x)

    def blocks_of(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Skipping(Tower):
    """From the embedding to the head."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


class Nested(Tower):
    """As in a U-Net: what early blocks made is added to what late ones get."""

    def forward(self, x: Tensor) -> Tensor:
        x, made = self.embed(x), []
        for i, block in enumerate(self.blocks):
            x = block(x + made[BLOCKS - 1 - i] if i >= BLOCKS // 2 else x)
            made.append(x)
        return self.head(self.norm(x))


class Changing(Tower):
    """Blocks are given a tensor that is written to between them."""

    class Block(Biased):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return x + torch.tanh(self.inner(x)) + bias

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        bias = x + 0.0
        for block in self.blocks:
            x = block(x, bias)
            bias.mul_(0.5)
        return self.head(self.norm(x))


class InPlace(Tower):
    """Code around the blocks writes to what they made, and to what is not here."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x *= 2
        padded = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        padded[:] = x
        x = padded
        for block in self.blocks:
            x = block(x)
            x += 0.5
        return self.head(self.norm(x))


class Gated(Tower):
    """One module has a number for each of its calls, and the last one is read after the blocks."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(BLOCKS, WIDTH))

        def forward(self, index: int) -> tuple[Tensor, int]:
            return self.weight[index], 1 + index

    def __init__(self) -> None:
        super().__init__()
        self.gate = self.Gate()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            weight, number = self.gate(index)
            x = block(x * weight) / number
        return self.head(self.norm(x)) * number


class OfTheModel(Tower):
    """Each block is given a parameter of the model's own, as it is; one of a module beside the blocks is not used."""

    block, root = Biased, True

    def __init__(self) -> None:
        super().__init__()
        self.rel, self.bias = nn.Embedding(1, WIDTH), nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, given = self.embed(x), self.bias if self.root else self.rel.weight
        for block in self.blocks:
            x = block(x, given)
        return self.head(self.norm(x))


class OfAModule(OfTheModel):
    """The other way round."""

    root = False


class EachTime(Tower):
    """The parameter is asked for in the loop over the blocks, so that every stage has it."""

    block = Biased

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.bias)
        return self.head(self.norm(x))


class AddedInPlace(Tower):
    """A module's output is written to before the first link gets it, and is read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x += self.place
        for block in self.blocks:
            x = block(x) + x
        return self.head(self.norm(x))


class Deep(nn.Module):
    """The list in a dict of modules, in a module; the head, of one Linear and nothing, is a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {"out": nn.LayerNorm(WIDTH), "in": linear(), "h": nn.Sequential(*(cases.Block() for _ in range(BLOCKS)))}
        )
        self.head = nn.Sequential(linear(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body.out(self.body.h(self.body["in"](x))))


SHAPES = (
    *(Tower, Masked, Tuples, Records, Remembered, Carried, Between),
    *(Twice, Skipping, Nested, Changing, InPlace, Deep, Gated),
    *(OfTheModel, OfAModule, EachTime, AddedInPlace),
)
LAYOUTS = (
    ("pipe=2", "ddp", {"schedule": "gpipe"}),
    ("pipe=3", "zero3", {"schedule": "1f1b"}),
    ("pipe=2 shard=2", "zero3", {"schedule": "interleaved"}),
    ("pipe=2", "zero2", {"schedule": "zbv"}),
    ("pipe=3", "zero1", {"schedule": "zb_h1", "split": (1, 2, 3)}),
    ("pipe=3 shard=2", "hpz", {"schedule": "1f1b", "hold": None}),
)
