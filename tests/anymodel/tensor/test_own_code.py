"""A mixture whose own code works on pieces; one of its experts returns its input.

The gradient of every whole parameter that cut computation reads must be summed over the axis, and no other gradient:
a missing or doubled sum is a silent error.  So all parameters are compared after two steps of SGD, in fp64.  Stock
models have many kinds of attention, gathered and divided products (``test_hf_plans.py``).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engine_cases import distinct, sgd, train
from tensor_models import alone, same_run, token_batches
from torch import Tensor, nn

from plait.anymodel import ModelPlan

WIDTH = 10


class Experts(nn.Module):
    """4 of them with 5 features; gate and up are in one matrix, end to end."""

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
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), Experts()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.norm(x_BTD)
        weights, chosen = self.router(h_BTD).sin().softmax(-1).flatten(0, 1).topk(2, -1)
        routed = self.experts(h_BTD.flatten(0, 1), chosen, weights).view_as(h_BTD)
        return x_BTD + routed + self.gate(h_BTD).sigmoid() * self.down(self.up(h_BTD).tanh())


PLAN = {
    **{"0": "vocabulary", "*.experts.gate_up": "column in 2", "*.experts.down": "row", "*.experts": "experts 2"},
    **{"*.experts.same": "once", "*.up": "column", "*.down": "row", "4": "gathered"},
}
IN_TIME = PLAN | {"1": "unsplit", "2": "unsplit", "3": "sequence"}


def model() -> nn.Module:
    return distinct(
        nn.Sequential(nn.Embedding(11, WIDTH), Mixture(), Mixture(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("mesh", "row", "recompute"),
    [("tensor=2", "ddp", "full"), ("tensor=3", "zero1", None), ("shard=2 tensor=2", "zero3", "full")],
)
def test_the_run_is_that_of_one_rank(mesh: str, row: str, recompute: str | None, sequence: bool) -> None:
    template, data = model(), token_batches()
    settings = {"tensor_plan": ModelPlan(IN_TIME if sequence else PLAN), "sequence_parallel": sequence}
    ranks = train(template, mesh, row, data, optimizer=sgd, recompute=recompute, **settings)
    same_run(ranks, alone(template, data))


def test_dropout_inside_experts_is_refused() -> None:
    template = model()
    template[1].experts.same = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="draws dropout"):
        train(template, "tensor=2", "ddp", token_batches(), optimizer=sgd, tensor_plan=ModelPlan(PLAN))
