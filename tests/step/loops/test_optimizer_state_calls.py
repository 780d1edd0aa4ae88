"""The optimizer's own calls, state region by region, and states that do not fit."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, deal, loss_sum
from state_cases import LAYOUTS, build, chain, go, groups, plainly, state_equal
from tensor_models import model as tensor_model
from tensor_models import token_batches
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, elementwise
from plait.table.mesh import Mesh

# ---- the optimizer's own calls -----------------------------------------------------------------------------------


def test_where_a_rank_has_everything_it_is_the_plain_optimizers() -> None:
    """An empty parameter and a frozen one, of which no rank updates anything, have their numbers too."""
    template = cases.distinct(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)))
    template[0].weight.requires_grad_(False)
    template[1].register_parameter("empty", nn.Parameter(torch.zeros(0, 2).double()))

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, optimizer=groups(model), strategy="ddp", loss_fn=loss_sum, count_fn=count)
        go(engine, 0, 2)
        assert engine.optimizer is not None
        return engine.optimizer.state_dict()

    _, optimizer = plainly(template, groups, 2)
    truth = optimizer.state_dict()
    for state in run(Mesh(shard=2), body, deadline=20):
        assert state["param_groups"] == truth["param_groups"] and len(truth["state"]) == 5
        assert state["state"].keys() == truth["state"].keys()
        for number, values in state["state"].items():
            assert all(cases.close(value, truth["state"][number][key]) for key, value in values.items())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("where", LAYOUTS)
def test_a_plain_optimizers_state_is_taken_up(where: str, named: bool) -> None:
    model, optimizer = plainly(chain(), groups, 2)
    state = get_optimizer_state_dict(model, optimizer) if named else optimizer.state_dict()

    def body(comm: Comm) -> Any:
        engine = build(comm, where)
        engine.load_full_state_dict(model.state_dict())
        assert engine.optimizer is not None
        engine.optimizer.load_state_dict(copy.deepcopy(state))
        engine.load_step_state({"step": 2, "seed": 0, "loss_scale": None})
        go(engine, 2, 4)
        return engine.full_state_dict()

    truth, _ = plainly(chain(), groups, 4)
    for state_of_rank in run(Mesh.parse(LAYOUTS[where][0]), body, deadline=20):
        assert all(cases.close(state_of_rank[name], value) for name, value in truth.state_dict().items())


@pytest.mark.parametrize("where", [name for name in LAYOUTS if name not in ("one", "ddp")])
def test_pieces_are_not_given_out_as_a_state(where: str) -> None:
    def body(comm: Comm) -> None:
        engine = build(comm, where)
        go(engine, 0, 1)
        engine.optimizers[0].state_dict()

    with pytest.raises(ValueError, match=r"AdamW\.state_dict\(\).*pieces only.*engine\.optimizer_state_dict\(\)"):
        run(Mesh.parse(LAYOUTS[where][0]), body, deadline=20)


# ---- region by region --------------------------------------------------------------------------------------------


class OnDisk:
    """What a file gives: a shape, and regions that it was asked for."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.read = values, values.shape, 0

    def __getitem__(self, region: Any) -> Tensor:
        self.read += self.values[region].numel()
        return self.values[region]


def test_a_rank_reads_only_its_own_elements() -> None:
    model, optimizer = plainly(chain(), groups, 2)
    state = get_optimizer_state_dict(model, optimizer)

    def body(comm: Comm) -> Any:
        lazy = {n: {k: OnDisk(v) for k, v in values.items()} for n, values in state["state"].items()}
        engine = build(comm, "zero3")
        engine.load_optimizer_state_dict({"state": lazy, "param_groups": state["param_groups"]})
        state_equal(engine.optimizer_state_dict(), state)
        return sum(one["exp_avg"].read for one in lazy.values())

    read = run(Mesh(shard=3), body, deadline=20)
    assert sum(read) == sum(p.numel() for p in model.parameters()) and max(read) < sum(read) / 2


@pytest.mark.parametrize("where", [*LAYOUTS, "tensor"])
def test_pieces_have_every_element_once(where: str) -> None:
    """Frozen parameters, and under the tensor axis parts of fused weights, too."""
    mesh, settings = LAYOUTS.get(where, ("replica=2 tensor=2", {"strategy": "hsdp"}))

    def body(comm: Comm) -> Any:
        model = tensor_model() if where == "tensor" else chain()
        for name, p in model.named_parameters():
            p.requires_grad_("norm" not in name)
        engine = Engine(model, comm, optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count, **settings)
        data = token_batches(1) if where == "tensor" else batches(1)
        engine.step(deal(data[0], comm.mesh, comm.rank, 1))
        state, bare = engine.optimizer_state_dict(), engine.optimizer_state_dict(elements=False)
        for values in bare["state"].values():
            assert values["exp_avg"].is_meta and float(values["step"]) == 1
        assert bare["param_groups"] == state["param_groups"]
        return list(engine.placed.pieces()), engine.full_state_dict(), state

    ranks = run(Mesh.parse(mesh), body, deadline=20)
    weights, state = ranks[0][1:]
    wanted = {(name, ""): value for name, value in weights.items()}
    for name, values in state["state"].items():
        wanted |= {(name, key): value for key, value in values.items() if value.dim() or not weights[name].dim()}
    seen = {key: torch.zeros_like(value) for key, value in wanted.items()}
    for pieces, *_ in ranks:
        for piece in pieces:
            region = tuple(slice(*ends) for ends in piece.region)
            assert torch.equal(wanted[piece.name, piece.key][region], piece.tensor)
            seen[piece.name, piece.key][region] += piece.first
    assert all(bool((times == 1).all()) for times in seen.values())


# ---- what does not fit -------------------------------------------------------------------------------------------


def other_groups(state: Any) -> None:
    state["param_groups"][0]["params"].append(state["param_groups"][1]["params"].pop())


def of_sgd(state: Any) -> None:
    group = state["param_groups"][0]
    del group["betas"], group["eps"]
    group["momentum"] = 0.9


def surplus(state: Any) -> None:
    state["state"]["head.weight"] = {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (other_groups, r"no group of the state has the parameters of group 0 of AdamW, 8 of them \(0\.up\.weight"),
        (of_sgd, r"another optimizer's: its group of .* has no betas, eps, which AdamW needs, but .*lr, .*momentum"),
        (surplus, r"1 parameters that no optimizer of the engine has: head\.weight"),
    ],
)
def test_a_state_of_something_else_is_refused(change: Any, text: str) -> None:
    def body(comm: Comm) -> None:
        engine = build(comm, "zero1")
        go(engine, 0, 1)
        state = engine.optimizer_state_dict()
        change(state)
        engine.load_optimizer_state_dict(state)

    with pytest.raises(ValueError, match=text):
        run(Mesh(shard=3), body, deadline=20)


def test_without_an_optimizer_there_is_none() -> None:
    def body(comm: Comm) -> None:
        Engine(chain(), comm, strategy="ddp").optimizer_state_dict()

    with pytest.raises(ValueError, match=r"no optimizer.*engine\.use"):
        run(Mesh(), body)


class Odd(torch.optim.SGD):
    """Keeps something that belongs to no element."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]


def test_a_state_that_cannot_be_put_together_is_refused_on_all_ranks() -> None:
    def body(comm: Comm) -> str:
        engine = build(comm, "zero3", lambda m: elementwise(Odd(m.parameters(), lr=0.1, momentum=0.9)))
        go(engine, 0, 1)
        with pytest.raises((ValueError, RuntimeError), match=r"'history' of '.*' is list"):
            engine.optimizer_state_dict()
        return ""

    run(Mesh(shard=3), body, deadline=20)


def test_the_tensor_axis_does_not_cut_for_what_needs_whole_matrices() -> None:
    def body(comm: Comm) -> None:
        model = tensor_model()
        Engine(model, comm, strategy="ddp", optimizer=torch.optim.Adafactor(model.parameters()))

    with pytest.raises(ValueError, match=r"Adafactor is not element-wise.*The tensor axis cuts \d+ of its parameters"):
        run(Mesh(tensor=2), body, deadline=20)


def test_what_belongs_to_no_parameter_is_refused() -> None:
    def body(comm: Comm) -> None:
        engine = build(comm, "zero1")
        go(engine, 0, 1)
        engine.optimizers[0].state["seen"] = {"batches": 3}
        engine.optimizer_state_dict()

    with pytest.raises(ValueError, match="AdamW keeps 'seen', which belongs to no parameter"):
        run(Mesh(shard=3), body, deadline=20)
