"""From a model and a plan to cuts, siblings and sites; every mistake is refused with its numbers and its fix."""

import re
from typing import Any

import pytest
import torch
from parallel_cases import OfTransformers
from torch import nn

from plait.run.models.gpt import GPT, GPTConfig
from plait.run.models.mlp import MLP, MLPConfig
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import Site, Style
from plait.tensor import Parallel, parallel_plan, plan_of


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.down = nn.Linear(5, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))
        self.out = nn.Linear(3, 4)
        self.head = nn.Linear(3, 7)


PLAN = {
    "embed": "vocabulary",
    "norm": "sequence",
    "mlps.*.gate": "column",
    "mlps.*.up": "column",
    "mlps.*.down": "row",
    "out": "gathered",
    "head": "vocabulary",
}


def refused(plan: dict[str, str], message: str, model: nn.Module | None = None, ways: int = 2, **settings: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parallel_plan(model or Model(), ways, plan, **settings)


def test_weights_and_biases_are_cut_as_their_styles_say() -> None:
    model = Model()
    parallel = parallel_plan(model, 2, PLAN)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[key]: (cut.shape, cut.dim) for key, cut in parallel.cuts.items()}
    block = {"gate.weight": ((5, 3), 0), "gate.bias": ((5,), 0), "up.weight": ((5, 3), 0), "down.weight": ((3, 5), 1)}
    assert found == {
        "embed.weight": ((7, 3), 0),
        **{f"mlps.{i}.{name}": cut for i in range(2) for name, cut in block.items()},
        "out.weight": ((4, 3), 0),
        "out.bias": ((4,), 0),
        "head.weight": ((7, 3), 0),
        "head.bias": ((7,), 0),
    }
    assert all(cut.ways == 2 for cut in parallel.cuts.values()) and not parallel.summed


def test_under_sequence_parallelism_norms_and_row_biases_are_summed() -> None:
    model = Model()
    parallel = parallel_plan(model, 2, PLAN, sequence=True)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[key] for key in parallel.summed} == {
        "norm.weight",
        "norm.bias",
        "mlps.0.down.bias",
        "mlps.1.down.bias",
    }


def test_sites_stand_in_the_models_order_and_siblings_share_one() -> None:
    parallel = parallel_plan(Model(), 2, PLAN)
    assert parallel.sites == (
        Site("leave", "embed", 3),
        *(site for i in range(2) for site in (Site("enter", f"mlps.{i}", 3), Site("leave", f"mlps.{i}.down", 3))),
        Site("enter", "out", 3),
        Site("gather", "out", 4),
        Site("enter", "head", 3),
        Site("loss", "loss", 0),
    )
    assert parallel.siblings("mlps.1.up") == ["mlps.1.gate", "mlps.1.up"]
    assert parallel.siblings("out") == ["out"] and parallel.siblings("head") == ["head"]


def test_one_rank_cuts_nothing_and_still_reads_the_plan() -> None:
    assert parallel_plan(Model(), 1) == parallel_plan(Model(), 1, PLAN) == Parallel()
    refused({"mlps.*.upp": "column"}, "names 'mlps.*.upp', which no module", ways=1)


def test_a_plan_is_resolved_without_values() -> None:
    with torch.device("meta"):
        model = Model()
    assert len(parallel_plan(model, 3, PLAN).cuts) == len(parallel_plan(Model(), 3, PLAN).cuts)


def test_heads_come_from_the_attention_modules_head_dim_and_ranks_share_whole_ones() -> None:
    model = GPT(GPTConfig(vocabulary=11, num_layers=1, width=16, num_heads=4, num_kv_heads=2, dropout=0.0))
    parallel = parallel_plan(model, 2)
    assert str(parallel.styles["blocks.0.attention.key"]) == "column by 4"
    assert str(parallel.styles["blocks.0.attention.output"]) == "row by 4"
    assert str(parallel.styles["blocks.0.mlp.up"]) == "column"
    assert plan_of(model) == model.tensor_plan()
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.attention\.key': 2 heads of 4 .*tensor=4 .*use tensor=2, or make"
    ):
        parallel_plan(model, 4)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Model carries no tensor plan: set model\.tensor_plan = "):
        parallel_plan(Model(), 2)


@pytest.mark.parametrize("how", ["dict", "method"])
def test_a_model_may_carry_its_plan_as_a_dict_or_a_method(how: str) -> None:
    model: Any = Model()
    model.tensor_plan = PLAN if how == "dict" else lambda: PLAN
    assert parallel_plan(model, 2).styles == parallel_plan(Model(), 2, PLAN).styles


class Carried(OfTransformers, Model):
    """A model of the library's own with a plan of transformers."""


def test_a_style_of_transformers_that_has_no_word_here_is_refused() -> None:
    with pytest.raises(ValueError, match="has the style 'ring', which plait has no word for"):
        parallel_plan(Carried({"mlps.*.up": "colwise", "mlps.*.down": "ring"}), 2)


def test_a_plan_of_transformers_in_our_words() -> None:
    """Names of other models are left out, and modules that it leaves whole; the ends are cut by vocabulary."""
    carried = {"mlps.*.up": "colwise", "mlps.*.down": "rowwise_split_input", "mlps.*.experts": "moe_tp_experts"}
    assert plan_of(Carried(carried | {"head": "colwise_gather_output", "norm": "replicate"})) == {
        "mlps.*.up": "column",
        "mlps.*.down": "divided",
        "embed": "vocabulary",
        "head": "vocabulary",
    }


def test_plans_that_do_not_fit_their_model_are_refused() -> None:
    refused({"norm": "column"}, "says 'column' for 'norm', a LayerNorm: only nn.Linear and nn.Embedding")
    refused({"mlps.0": "row"}, "says 'row' for 'mlps.0', a Mlp: only nn.Linear and nn.Embedding")
    refused({"embed": "column"}, "says 'column' for the embedding 'embed': say vocabulary")
    refused({"embed": "row"}, "says 'row' for the embedding 'embed': say vocabulary")
    refused({"out": "column 3|2"}, "'column 3|2' for 'out': the parts 3|2 add up to 5, not to 4")
    refused({"out": "column by 3"}, "'column by 3' for 'out': a part of 4 is no multiple of 3")
    refused({"out": "column by 2"}, "2 heads of 2 cannot be shared by tensor=3", ways=3)
    refused({"embed": "vocabulary"}, "a vocabulary of 7 rows leaves a rank of tensor=5 without any", ways=5)
    refused({"mlps.*.up": "column", "mlps.1.*": "row"}, "shards 'mlps.1.up' twice")
    without = {style: {k: v for k, v in PLAN.items() if v != style} for style in ("sequence", "vocabulary")}
    refused(without["sequence"], "names no module that works on it: say 'sequence'", sequence=True)
    refused(without["vocabulary"], "begins at an embedding that is cut by vocabulary", sequence=True)


def test_a_shared_weight_is_cut_once_and_for_all_its_modules() -> None:
    """A head that reads the embedding's piece and is not in the plan raises in its first call."""
    model = Model()
    model.head = nn.Linear(3, 7, bias=False)
    model.head.weight = model.embed.weight
    for plan in (PLAN, {"embed": "vocabulary"}):
        assert parallel_plan(model, 2, plan).cuts[id(model.head.weight)] == TensorCut((7, 3), 0, 2, (7,))
    refused({"embed": "vocabulary", "head": "row"}, "shards head.weight twice", model)


def test_the_mlp_cuts_its_inner_layers_in_pairs() -> None:
    model = MLP(MLPConfig(num_layers=8, width=5, dropout=0.1))
    parallel = parallel_plan(model, 3)
    kinds = {name: style.kind for name, style in parallel.styles.items() if name.endswith("linear")}
    assert kinds == {f"{i}.linear": "column" if i % 2 else "row" for i in range(1, 7)}
    assert parallel.styles["1.dropout"] == Style("hidden")
