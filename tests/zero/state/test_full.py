"""The full state: the model's names and values, tied aliases and buffers too, from any row and mesh into any other."""

from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import ROWS, SPLIT_ROWS, agree, batches, close, distinct, net, plain, sgd, train
from pipeline_cases import engine_on
from tensor_models import Model, alone, model, same_run
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.run.models.gpt import GPT, GPTConfig
from plait.step import Engine, empty_parameters
from plait.zero.state.init import materialise


class Full(nn.Module):
    """Tied weights, a persistent and a transient buffer, a frozen weight, an int64 counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(cases.WIDTH, cases.WIDTH, bias=False)
        self.blocks = nn.ModuleList(cases.Block() for _ in range(2))
        self.frozen = nn.Linear(cases.WIDTH, cases.WIDTH).requires_grad_(False)
        self.last = nn.Linear(cases.WIDTH, cases.WIDTH)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.linspace(-1, 1, cases.WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("transient", torch.ones(3), persistent=False)

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = self.first(x_BC) + self.shift
        for block in self.blocks:
            x_BC = block(x_BC)
        return self.last(self.frozen(x_BC))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=1", "shard=3", "replica=2 shard=2"])
def test_full_state_is_the_single_process_state(mesh: str, row: str) -> None:
    template = distinct(Full())
    ranks = train(template, mesh, row, batches(), microbatches=2)
    agree(ranks, plain(template, batches()))
    assert torch.equal(ranks[0].state["last.weight"], ranks[0].state["first.weight"])
    assert "transient" not in ranks[0].state
    reloaded = distinct(Full(), seed=5)
    reloaded.load_state_dict(ranks[0].state)  # strict: a plain model takes it as its own


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda state: state.pop("blocks.1.up.bias"), r"missing.*blocks\.1\.up\.bias"),
        (lambda state: state.update(surplus=torch.zeros(1)), "surplus"),
        (lambda state: state.update(shift=torch.zeros(99)), r"shift.*\(99,\)|\(5,\).*\(99,\)"),
        (lambda state: state.update({"first.weight": torch.zeros(2, 2)}), r"first\.weight.*\(2, 2\)"),
        (lambda state: state.update({"first.weight": state["first.weight"] * 1j}), "complex.*give its real part"),
    ],
)
@each_rank("shard=2")
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(comm: Comm, damage: Any, says: str) -> None:
    engine = Engine(distinct(Full()), comm, strategy="zero3")
    before = engine.full_state_dict()
    state = {name: value + 1 for name, value in before.items()}
    damage(state)
    with pytest.raises(ValueError, match=says):
        engine.load_full_state_dict(state)
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "half a state was taken"


@each_rank("shard=2")
def test_the_state_is_a_copy(comm: Comm) -> None:
    engine = Engine(net(), comm, strategy="ddp")
    state = engine.full_state_dict()
    for value in state.values():
        value.zero_()
    assert all(value.abs().sum() > 0 for name, value in engine.full_state_dict().items() if "scale" not in name)


@pytest.mark.parametrize("row", SPLIT_ROWS)
@each_rank("replica=2 shard=2")
def test_a_state_loaded_behind_a_forward_without_a_backward_counts(comm: Comm, row: str) -> None:
    x, other = torch.ones(2, 5).double(), distinct(net(), seed=3)
    engine = engine_on(net(), comm, strategy=row)
    engine.model(x)
    engine.load_full_state_dict(other.state_dict())
    assert close(engine.model(x).detach(), other(x))


@each_rank("shard=2")
def test_a_state_is_not_loaded_while_parameters_are_gathered(comm: Comm) -> None:
    engine = engine_on(net(), comm, strategy="zero3")
    with engine.gathered(), pytest.raises(ValueError, match="leave the block first"):
        engine.load_full_state_dict(net().state_dict())


SIZES = GPTConfig(vocabulary=13, num_layers=2, width=24, num_heads=6, num_kv_heads=6, hidden=11, max_length=8)


def empty_gpt() -> nn.Module:
    with empty_parameters():
        return GPT(SIZES)


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

    for state in plait.run_threads(mesh, lambda comm: Engine(half(), comm, strategy="zero3", seed=5).full_state_dict()):
        assert list(state) == list(wanted) and all(torch.equal(state[name], wanted[name]) for name in wanted)


@each_rank("tensor=2", refused=r"'blocks.0.mlp.up.weight' has shape \(7, 5\), the state's has \(4, 5\)")
def test_a_state_of_another_shape_is_refused_with_whole_shapes(comm: Comm) -> None:
    engine = Engine(model(), comm, strategy="ddp")
    state = engine.full_state_dict()
    state["blocks.0.mlp.up.weight"] = state["blocks.0.mlp.up.weight"][:4]
    engine.load_full_state_dict(state)


def test_a_plan_given_beside_the_model_wins_over_the_models_own() -> None:
    data = batches()
    ranks = train(net(), "tensor=2", "ddp", data, sgd, tensor_plan={})
    same_run(ranks, alone(net(), data), 0.0)
