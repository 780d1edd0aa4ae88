"""Styles of modules whose own code works on pieces: their cuts and sites, plans that do not fit, and one that trains.

The gradient of every whole parameter that cut computation reads must be summed over the axis, and no other gradient:
a missing or doubled sum is a silent error.  So all parameters are compared after two steps of SGD, in fp64.  Stock
models have many kinds of attention, gathered and divided products (``test_hf_plans.py``).
"""

import re

import pytest
import torch
import torch.nn.functional as F
from engine_cases import distinct, sgd, train
from parallel_cases import OfTransformers
from tensor_models import alone, same_run, token_batches
from torch import Tensor, nn

from plait.anymodel import ModelPlan, plan_of
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import Site, Style
from plait.tensor import parallel_plan


class Experts(nn.Module):
    """3 experts of 5 features, gate and up in one matrix; each token goes to 2 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.zeros(3, 10, 4)), nn.Parameter(torch.zeros(3, 4, 5))
        self.up_bias = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


EXPERTS = {"0.gate_up": "column in 2", "0.down": "row", "0.up_bias": "row", "0": "experts 2"}


def test_matrices_of_experts_are_cut_where_their_hidden_features_are() -> None:
    model = nn.Sequential(Experts())
    parallel = parallel_plan(model, 2, ModelPlan(EXPERTS))
    cuts = {n: parallel.cuts[id(p)] for n, p in model.named_parameters()}
    assert cuts["0.gate_up"] == TensorCut((3, 10, 4), 1, 2, (5, 5))
    assert cuts["0.down"] == TensorCut((3, 4, 5), 2, 2, (5,))
    assert cuts["0.up_bias"] == TensorCut((3, 5), 1, 2, (5,))
    assert parallel.sites == (Site("sum", "0", 4), Site("share", "0", 4), Site("share", "0", 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.gate_up": "column"}, "in {'gate_up': 10, 'down': 5, 'up_bias': 5} features, which do not meet"),
        ({"0.up_bias": None}, "nothing for '0.up_bias', which would be added once for each rank"),
        ({"0": None}, "not what its module does with a piece: say 'experts'"),
        ({"0.down": "gathered"}, "a module's own parameters are cut by 'column' or 'row'"),
        ({"0.down": "row in 2"}, "of shape [3, 4, 5]"),
    ],
)
def test_experts_whose_pieces_do_not_fit_are_refused(change: dict[str, str | None], message: str) -> None:
    plan = {pattern: style for pattern, style in (EXPERTS | change).items() if style is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        parallel_plan(nn.Sequential(Experts()), 2, ModelPlan(plan))


def test_the_library_knows_no_experts() -> None:
    with pytest.raises(ValueError, match=r"unknown style 'experts'.*plait\.anymodel\.ModelPlan has more"):
        parallel_plan(nn.Sequential(Experts()), 2, EXPERTS)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.experts = nn.Embedding(7, 3), nn.Linear(3, 7), Experts()


class Carried(OfTransformers, Mixture):
    """A mixture with a plan of transformers."""


def test_experts_that_do_not_say_how_many_serve_a_token_are_refused() -> None:
    model = Carried({"experts.gate_up": "packed_colwise", "experts": "moe_tp_experts"})
    with pytest.raises(ValueError, match=r"'experts', and its config does not say how many .*num_experts_per_tok"):
        plan_of(model)
    model.text.num_experts_per_tok = 2
    assert plan_of(model)["experts"] == "experts 2"


@pytest.mark.parametrize(
    "text", ["experts 2", "experts", "shared 64", "once", "local", "split", "unsplit", "column by 2"]
)
def test_what_is_written_is_read_back(text: str) -> None:
    assert str(Style.parse(text, ModelPlan.kinds)) == text


WIDTH = 10


class OwnExperts(nn.Module):
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


class OwnMixture(nn.Module):
    """Two of five experts for each token, the first of which returns what it gets; one for all beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), OwnExperts()
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
        nn.Sequential(nn.Embedding(11, WIDTH), OwnMixture(), OwnMixture(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
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
