"""Shared by the tests of recomputation: blocks that draw at every kind of site, and a comparison of bits."""

from typing import Any

import engine_cases as cases
import torch
import torch.nn.functional as F
from engine_cases import Run, batches, distinct, train
from torch import Tensor, nn

from plait.step import Engine

HEADS, HEAD = 2, 3


class Attends(nn.Module):
    """Attention over the features of a row, as if they were time; draws at its own site and inside of the kernel."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(1, 3 * HEADS * HEAD), nn.Linear(HEADS * HEAD, 1)
        self.dropout = dropout

    def forward(self, x_BC: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BC[..., None]).unflatten(-1, (3, HEADS, HEAD)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        out = F.dropout(self.out(mixed.transpose(1, 2).flatten(2))[..., 0], 0.2)
        return x_BC + out


class Drops(cases.Block):
    """A block that draws by a module of its own, and in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x_BC: Tensor) -> Tensor:
        return F.dropout(super().forward(self.drop(x_BC)), 0.1)


def model_of(*blocks: nn.Module, kind: type[cases.Net] = cases.Net) -> nn.Module:
    model = kind(0)
    model.blocks = nn.ModuleList(blocks)
    return distinct(model)


def bits(ours: list[Run], theirs: list[Run]) -> None:
    """Losses, gradients, norms and weights, on every rank."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.losses == b.losses and a.norms == b.norms and a.local == b.local
        assert all(torch.equal(a.state[name], b.state[name]) for name in b.state)
        for mine, others in zip(a.gradients, b.gradients, strict=True):
            assert mine.keys() == others.keys() and all(torch.equal(mine[key], others[key]) for key in others)


def messages(engine: Engine) -> list[str]:
    return sorted(str(entry) for entry in engine.comm.ledger.entries if entry.note.phase != "setup")


def unchanged(
    template: nn.Module, mesh: str = "shard=2", row: str = "zero3", recompute: str = "full", **settings: Any
) -> None:
    """The same bits, the same messages, as without."""
    settings = {"microbatches": 2, "clip": 0.5, **settings}
    once = train(template, mesh, row, batches(), look=messages, **settings)
    again = train(template, mesh, row, batches(), look=messages, recompute=recompute, **settings)
    bits(again, once)
    assert [r.seen for r in again] == [r.seen for r in once]


class Recurrent(cases.Net):
    """One block, three times."""

    def through(self, x_BC: Tensor) -> Tensor:
        for _ in range(3):
            x_BC = self.blocks[0](x_BC)
        return x_BC
