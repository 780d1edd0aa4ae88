"""Modules whose own code works on pieces: experts, a latent attention with sinks, whole products between two gathers.

Every gradient of a whole parameter that cut computation reads must be summed over the axis, and no other: one that is
not, or twice, is a silent error.  So all parameters are compared after two steps of SGD, in fp64, on two and three
ranks, with the stream whole and cut in time.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engine_cases import distinct, sgd, train
from tensor_models import alone, same_run, token_batches
from torch import Tensor, nn

from plait.anymodel import ModelPlan

WIDTH, HEADS, HEAD = 10, 6, 4


class Attention(nn.Module):
    """Keys are made of a latent, cut by heads, and of a part that all heads share; a sink on each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD)
        self.latent = nn.Linear(WIDTH, 5 + 2)
        self.latent_norm, self.query_norm = nn.LayerNorm(5), nn.LayerNorm(HEAD)
        self.key_value = nn.Linear(5, HEADS * (2 + HEAD), bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        latent, common = self.latent(x_BTD).split([5, 2], -1)
        query = self.query_norm(self.query(x_BTD).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        own, value = (
            self.key_value(self.latent_norm(latent)).unflatten(-1, (-1, 2 + HEAD)).transpose(1, 2).split([2, HEAD], -1)
        )
        key = torch.cat([own, common[:, None].expand(-1, own.size(1), -1, -1)], -1)
        scores = query @ key.transpose(-1, -2)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:2], scores.size(2), 1)
        shares = torch.cat([scores, sinks.expand(scores.size(0), -1, -1, -1)], -1).softmax(-1)[..., :-1]
        out_BTD: Tensor = self.out((shares @ value).transpose(1, 2).flatten(2))
        return out_BTD


class Experts(nn.Module):
    """4 of them with 5 features; gate and up lie in one matrix, end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.zeros(4, 10, WIDTH)), nn.Parameter(torch.zeros(4, WIDTH, 5))
        self.same = nn.Identity()

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        y_ND = torch.zeros_like(x_ND)
        for expert in range(5):
            tokens, place = torch.where(chosen_NK == expert)
            made = self.same(x_ND[tokens])
            if expert:
                gate, up = F.linear(x_ND[tokens], self.gate_up[expert - 1]).chunk(2, -1)
                made = F.linear(gate.tanh() * up, self.down[expert - 1])
            y_ND = y_ND.index_add(0, tokens, made * weights_NK[tokens, place, None])
        return y_ND


class Mixture(nn.Module):
    """Two of five experts for each token, the first of which returns what it gets; one for all beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 5), Experts()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights, chosen = self.router(x_BTD).sin().softmax(-1).flatten(0, 1).topk(2, -1)
        routed = self.experts(x_BTD.flatten(0, 1), chosen, weights).view_as(x_BTD)
        return routed + self.gate(x_BTD).sigmoid() * self.down(self.up(x_BTD).tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mixture_norm, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm(x_BTD))
        x_BTD = x_BTD + self.mixture(self.mixture_norm(x_BTD))
        return x_BTD


class Dense(nn.Module):
    """A product that is gathered, a norm over all of it, and one whose input is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.wide_norm = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH), nn.LayerNorm(11)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.narrow(self.wide_norm(self.wide(x_BTD)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Dense(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        out_BTC: Tensor = self.head(self.norm(x_BTD))
        return out_BTC


PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "blocks.*.attention.query": f"column by {HEAD}",
    "blocks.*.attention.query_norm": "summed",
    "blocks.*.attention.latent": "shared 2",
    "blocks.*.attention.key_value": f"column by {2 + HEAD}",
    "blocks.*.attention.sinks": "column",
    "blocks.*.attention.out": f"row by {HEAD}",
    "blocks.*.mixture.experts.gate_up": "column in 2",
    "blocks.*.mixture.experts.down": "row",
    "blocks.*.mixture.experts": "experts 2",
    "blocks.*.mixture.experts.same": "once",
    "blocks.*.mixture.up": "column",
    "blocks.*.mixture.down": "row",
    "blocks.1.wide": "gathered",
    "blocks.1.narrow": "divided",
    "head": "gathered",
}
WHOLE = PLAN | {"blocks.*.attention": "local"}
IN_TIME = PLAN | {
    "blocks.*.attention": "unsplit",
    "blocks.*.mixture": "unsplit",
    "blocks.1": "unsplit",
    "blocks.*.norm": "sequence",
    "blocks.*.mixture_norm": "sequence",
    "norm": "sequence",
}


def model() -> nn.Module:
    return distinct(Model())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("mesh", "row"),
    [("tensor=2", "ddp"), ("tensor=3", "zero1"), ("shard=2 tensor=2", "zero3"), ("shard=2 tensor=3", "hpz")],
)
def test_the_run_is_that_of_one_rank(mesh: str, row: str, sequence: bool) -> None:
    template, data = model(), token_batches()
    settings = {"tensor_plan": ModelPlan(IN_TIME if sequence else WHOLE), "sequence_parallel": sequence}
    ranks = train(template, mesh, row, data, optimizer=sgd, **settings)
    same_run(ranks, alone(template, data))


@pytest.mark.parametrize("recompute", [None, "full"])
def test_it_is_also_that_of_one_rank_when_blocks_run_again(recompute: str | None) -> None:
    template, data = model(), token_batches()
    for plan in (WHOLE, IN_TIME):
        settings = {"tensor_plan": ModelPlan(plan), "sequence_parallel": plan is IN_TIME, "recompute": recompute}
        same_run(train(template, "tensor=2", "zero2", data, optimizer=sgd, **settings), alone(template, data))


def test_dropout_inside_experts_is_refused() -> None:
    template = model()
    template.blocks[0].mixture.experts.same = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="draws dropout"):
        train(template, "tensor=2", "ddp", token_batches(), optimizer=sgd, tensor_plan=ModelPlan(WHOLE))


def test_code_that_does_not_fit_its_pieces_is_said_to_be_so() -> None:
    plan = {name: style for name, style in WHOLE.items() if "sinks" not in name}
    with pytest.raises(ValueError, match="the model's code fails where each of 2 tensor ranks has pieces"):
        train(model(), "tensor=2", "ddp", token_batches(), optimizer=sgd, tensor_plan=ModelPlan(plan))
