"""Styles of modules whose own code works on pieces: their cuts and sites, and plans that do not fit."""

from __future__ import annotations

import re

import pytest
import torch
from parallel_cases import OfTransformers
from torch import nn

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
