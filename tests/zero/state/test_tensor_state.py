"""Values in and out under a tensor axis: no mesh changes the initial weights, and a state fits every other mesh."""

from __future__ import annotations

import pytest
import torch
from engine_cases import batches, net, sgd, train
from tensor_models import Model, alone, model, same_run
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.run.models.gpt import GPT, GPTConfig
from plait.step import Engine, empty_parameters
from plait.zero.state.init import materialise

SIZES = GPTConfig(vocabulary=13, num_layers=2, width=24, num_heads=6, num_kv_heads=6, hidden=11, max_length=8)


def empty_gpt() -> nn.Module:
    with empty_parameters():
        return GPT(SIZES)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert list(ours) == list(theirs)
    return [n for n in theirs if not torch.equal(ours[n], theirs[n])] == []


def test_a_rank_holds_its_share_of_what_is_cut() -> None:
    def body(comm: Comm) -> int:
        mine = empty_gpt()
        Engine(mine, comm, strategy="ddp", seed=5)
        return sum(p.numel() for p in mine.parameters())

    whole, norms = sum(p.numel() for p in empty_gpt().parameters()), 5 * 24
    held = plait.run_threads("tensor=3", body)
    assert sum(held) == whole + 2 * norms, "only norms are held more than once"


MIXED = ["blocks.0.mlp.gate.weight", "blocks.1.attention.qkv.bias", "norm.weight", "embed.weight"]


@pytest.mark.parametrize("mesh", ["tensor=2", "shard=2 tensor=3", "replica=2 shard=2"])
def test_parameters_with_values_keep_them_and_the_others_are_drawn(mesh: str) -> None:
    def half() -> nn.Module:
        with empty_parameters():
            made = Model()
        values = dict(model().float().named_parameters())
        for name in MIXED:
            owner, _, short = name.rpartition(".")
            setattr(made.get_submodule(owner), short, nn.Parameter(values[name].detach().clone()))
        return made

    alone = half()
    materialise(alone, 5, torch.device("cpu"))
    wanted = alone.state_dict()
    assert all(torch.equal(wanted[name], dict(model().float().named_parameters())[name]) for name in MIXED)

    def body(comm: Comm) -> dict[str, Tensor]:
        return Engine(half(), comm, strategy="zero3", seed=5).full_state_dict()

    assert all(same(state, wanted) for state in plait.run_threads(mesh, body))


def test_a_state_of_another_shape_is_refused_with_whole_shapes() -> None:
    def body(comm: Comm) -> None:
        engine = Engine(model(), comm, strategy="ddp")
        state = engine.full_state_dict()
        state["blocks.0.mlp.up.weight"] = state["blocks.0.mlp.up.weight"][:4]
        engine.load_full_state_dict(state)

    with pytest.raises(ValueError, match=r"'blocks.0.mlp.up.weight' has shape \(7, 5\), the state's has \(4, 5\)"):
        plait.run_threads("tensor=2", body)


def test_a_plan_given_beside_the_model_wins_over_the_models_own() -> None:
    data = batches()
    ranks = train(net(), "tensor=2", "ddp", data, sgd, tensor_plan={})
    same_run(ranks, alone(net(), data), 0.0)
