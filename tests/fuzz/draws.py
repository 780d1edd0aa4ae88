"""Shared modules that draw random numbers, in pipelines and recomputations, against one process of one batch.

python tests/fuzz/draws.py 0 200          seeds 0 to 199, one JSON line each
python tests/fuzz/draws.py 17 --show      seed 17, with its traceback

sharing        one module in all blocks, in some, in the model too, in a list; a branch with weights; whole blocks
draws          dropout modules and functions, of channels, in attention, torch's plain draws; several in a call
stages         rows, orders, splits, chunks, microbatches
recomputation  of blocks, of attention, a checkpoint of the program's around a module or a block

The verdicts are those of ``fuzz.py``; in one process no two draws of a forward may have one site, either.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import Layout, Outcome, State, judged, main

import plait
from plait.forward.dropout import DropoutRNG
from plait.schedule.orders import ORDERS
from plait.table.mesh import Mesh

STEPS, SAMPLES, TIME, WIDTH = 2, 12, 3, 4


class Draw(nn.Module):
    """Draws in one of the ways that the engine serves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Dropout(0.4)
        self.channels = nn.Dropout1d(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.kind](self, x) if self.training else x


def attended(draw: Draw, x: Tensor) -> Tensor:
    h = x.unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.4).transpose(1, 2).flatten(2)


WAYS: dict[str, Callable[[Draw, Tensor], Tensor]] = {
    "module": lambda draw, x: draw.inner(x),
    "function": lambda draw, x: F.dropout(x, 0.4),
    "twice": lambda draw, x: F.dropout(draw.inner(x) + F.dropout(x, 0.3), 0.2),
    "module twice": lambda draw, x: draw.inner(x) + draw.inner(x),
    "channels": lambda draw, x: draw.channels(x),
    "attention": attended,
    "noise": lambda draw, x: x + torch.randn_like(x) * 0.3 - torch.rand(len(x), 1, 1, dtype=x.dtype),
    "bernoulli": lambda draw, x: x * torch.full_like(x, 0.6).bernoulli(),
    "step": lambda draw, x: x if torch.rand([]) < 0.5 else x * 0.5,
    "gumbel": lambda draw, x: x + F.gumbel_softmax(x, tau=0.7),
}


class Branch(nn.Module):
    """Weights around a draw."""

    def __init__(self, draw: nn.Module) -> None:
        super().__init__()
        self.up, self.draw, self.down = nn.Linear(WIDTH, 5), draw, nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh()) + self.draw(x)
        return out


class Block(nn.Module):
    def __init__(self, draws: list[nn.Module], *, again: bool, hidden: nn.Module | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draws = nn.ModuleList(draws)
        self.again, self._hidden = again, [] if hidden is None else [hidden]

    def forward(self, x: Tensor, given: nn.Module | None = None) -> Tensor:
        h = self.linear(x).tanh()
        for draw in (*self.draws, *self._hidden, *([] if given is None else [given])):
            h = checkpoint(draw, h, use_reentrant=False) if self.again else draw(h)
        return (x + F.dropout(h, 0.1, self.training)).tanh()


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kinds = [draw.choice(list(WAYS)) for _ in range(3)]
        count, sharing = draw.randint(4, 6), draw.choice(SHARING)
        one = Draw(kinds[0]) if draw.random() < 0.7 else Branch(Draw(kinds[0]))
        again = draw.random() < 0.2
        first = draw.random() < 0.5

        def draws(number: int) -> list[nn.Module]:
            own = [Draw(draw.choice(kinds))] if draw.random() < 0.5 else []
            if sharing == "list":
                return [*own, one, *own, one][: draw.randint(2, 4)]
            shared = sharing in ("all", "model") or (sharing == "some" and draw.random() < 0.6)
            return [*own, one] if shared else own

        def block(number: int) -> Block:
            holds = sharing == "held" or (sharing == "held by the first" and number)
            here = [one] if sharing == "held by the first" and not number else draws(number)
            return Block(here, again=again, hidden=one if holds else None)

        self.first = nn.Linear(WIDTH, WIDTH)
        if first and sharing in ("model", "given", "held", "around"):
            self.draw = one
        blocks = [block(number) for number in range(count)]
        if sharing == "blocks":
            blocks = [draw.choice(blocks[:2]) for _ in range(count)]
        self.blocks = nn.ModuleList(blocks)
        if not first and sharing in ("model", "given", "held", "around"):
            self.draw = one
        self.last = nn.Linear(WIDTH, 2)
        self.sharing, self.outer, self.given = sharing, draw.random() < 0.2, draw.randint(0, 1)
        self.parts = (sharing, type(one).__name__, *kinds, f"again={again}", f"outer={self.outer}", f"{count} blocks")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.sharing == "model":
            x = self.draw(self.draw(x))
        for number, block in enumerate(self.blocks):
            given = (self.draw,) if self.sharing == "given" and (number + self.given) % 2 else ()
            x = checkpoint(block, x, *given, use_reentrant=False) if self.outer else block(x, *given)
            if self.sharing == "around":
                x = self.draw(x)
        return self.last(x)  # type: ignore[no-any-return]


SHARING = ["none", "all", "some", "model", "around", "list", "blocks", "given", "held", "held by the first"]
"""Who has the draw that is shared."""


def built(seed: int) -> Model:
    model = Model(random.Random(seed)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def drawn_layout(seed: int) -> Layout:
    draw = random.Random(-1 - seed)
    mesh = draw.choice(["pipe=2"] * 4 + ["pipe=3", "pipe=2 shard=2", "shard=2", "shard=1"])
    settings: dict[str, Any] = {"strategy": draw.choice(["ddp", "zero1", "zero2", "zero3"])}
    if (recompute := draw.choice([None, None, "full", "full", "selective"])) is not None:
        settings["recompute"] = recompute
    if "pipe" in mesh:
        settings["schedule"] = draw.choice(list(ORDERS))
        settings |= {"chunks": 2} if settings["schedule"] == "interleaved" else {}
    return Layout(mesh, settings, "sgd", None, "step", draw.choice([1, 2, 3]))


def trained(seed: int, layout: Layout) -> list[State]:
    mesh = Mesh.parse(layout.mesh)
    nets = [built(seed) for _ in range(mesh.size)]

    def body(comm: plait.Comm) -> State:
        net, generator, losses = nets[comm.rank], torch.Generator().manual_seed(seed), []
        engine = plait.Engine(
            net,
            comm,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.003, momentum=0.9),
            loss_fn=lambda model, batch: model(batch).square().sum(),
            count_fn=len,
            **layout.settings,
        )
        ways = mesh.data_size * layout.microbatches
        for _ in range(STEPS):
            x = torch.randn(SAMPLES, TIME, WIDTH, generator=generator, dtype=torch.float64)
            first = mesh.data_rank(comm.rank) * layout.microbatches
            losses.append(engine.step(x.tensor_split(ways)[first : first + layout.microbatches]).loss)
        return losses, engine.full_state_dict()

    return plait.run_threads(mesh, body, deadline=30)


def alone(seed: int) -> tuple[State, list[str]]:
    """One process of one microbatch, and the sites of its draws."""
    sites: list[str] = []
    site = DropoutRNG.site

    def seen(self: DropoutRNG) -> Any:
        position, module, name = site(self)
        sites.append(f"step {position.step}: {name}")
        return position, module, name

    model = built(seed)
    model.outer = False
    for block in model.blocks:
        block.again = False  # type: ignore[union-attr]
    with mock.patch.object(DropoutRNG, "site", seen), mock.patch(f"{__name__}.built", lambda _: model):
        (state,) = trained(seed, Layout("shard=1", {"strategy": "ddp"}, "sgd", None, "step", 1))
    return state, sites


def try_seed(seed: int, *, show: bool = False) -> Outcome:
    """What becomes of a seed."""
    layout, parts = drawn_layout(seed), built(seed).parts
    theirs, sites = alone(seed)
    if len(set(sites)) < len(sites):
        return Outcome(seed, "wrong", 0, parts, layout, f"two draws at one of {sites}")
    return judged(seed, parts, layout, theirs, lambda: trained(seed, layout), show=show)


if __name__ == "__main__":
    main(try_seed)
