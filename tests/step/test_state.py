"""The optimizers' state leaves a layout whole and enters any other; a run goes on there as if it had never moved."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from each_rank import each_world
from engine_cases import adamw, batches, count, distinct, loss_sum, sgd
from programs import STAGES, World, assert_same, chain, on_ranks, refused, step, update
from tensor_models import model as tensor_model
from tensor_models import token_batches
from test_together import two
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from plait.step import elementwise
from plait.table.precision import LossScale


def groups(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with their own options, and a schedule's."""
    decayed, others = ([p for p in parameters if (p.dim() > 1) is matrix] for matrix in (True, False))
    own = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.02}]
    made = torch.optim.AdamW(own, lr=0.01, eps=1e-4)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5)
    return made


def muon(parameters: Any) -> Any:
    matrices, others = ([p for p in parameters if (p.dim() == 2) is matrix] for matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=0.05), *([adamw(others)] if others else [])]


class Counts(torch.optim.SGD):
    """Keeps what is no floating-point number of each element."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", torch.tensor((1 << 24) + 1)) + 2
                state["wraps"] = state.get("wraps", torch.full_like(p, 250, dtype=torch.uint8)) + 3
                state["word"] = "even" if state["calls"] % 2 == 0 else "odd"
                if p.grad is not None:
                    p.grad *= 1 + state["wraps"].to(p.dtype) / 256 + (state["calls"] % 1000).to(p.dtype) / 1000
        return super().step(closure)


KINDS: dict[str, Any] = {
    "groups": groups,
    "sgd": sgd,
    "two": two,
    "nadam": lambda p: elementwise(torch.optim.NAdam(p, lr=0.01)),  # has a product in fp32
    "counts": lambda p: elementwise(Counts(p, lr=0.01)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),  # a row and a column for a matrix
    "muon": muon,
}
WHOLE_TENSORS = ("adafactor", "muon")


def template(kind: str, where: str) -> nn.Module:
    if where == "tensor":
        return tensor_model(0.0)
    widths = itertools.pairwise((5, 12, 9, 3))
    layers = [nn.Sequential(nn.Linear(a, b, bias=False), nn.Dropout(0.2)) for a, b in widths]
    return distinct(nn.Sequential(*layers)) if kind in WHOLE_TENSORS else chain()


def begun(kind: str, world: World, **settings: Any) -> Any:
    cut = {"cut": "tensor"} if kind in WHOLE_TENSORS else {}
    return world.engine(template(kind, world.where), KINDS[kind], **(cut | settings))


def go(engine: Any, world: World, first: int, last: int) -> list[float]:
    data = token_batches(last) if world.where == "tensor" else batches(last)
    return [engine.step(world.parts(batch)).loss for batch in data[first:]]


def saved(engine: Any) -> Any:
    return copy.deepcopy((engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()))


def load(engine: Any, state: Any) -> None:
    engine.load_full_state_dict(state[0])
    engine.load_optimizer_state_dict(state[1])
    engine.load_step_state(state[2])


def ordered(state: Any) -> Any:
    return state | {"param_groups": sorted(state["param_groups"], key=lambda group: group["params"])}


@pytest.mark.parametrize("where", [*STAGES, "zero3@cpu", "zero3+bf16", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
@each_world()
def test_a_run_that_is_taken_up_is_the_run_that_goes_on(world: World, kind: str) -> None:
    engine = begun(kind, world)
    go(engine, world, 0, 2)
    state, losses = saved(engine), go(engine, world, 2, 4)
    again = begun(kind, world)
    for optimizer in again.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 7.0  # whatever the new one was built with
    load(again, state)
    assert_same(ordered(again.optimizer_state_dict()), ordered(state[1]))
    assert again.steps == 2 and go(again, world, 2, 4) == losses
    assert_same(saved(again), saved(engine))


@pytest.mark.parametrize("where", [*STAGES, "zero3@cpu"])
def test_it_is_what_plain_torch_has_by_name_and_the_other_way_round(where: str) -> None:
    alone = World("none").engine(chain(), groups)
    for batch in batches(2):
        alone.step([batch])
    plain = copy.deepcopy(get_optimizer_state_dict(alone.model, alone.optimizers[0]))
    numbered, weights = copy.deepcopy(alone.optimizers[0].state_dict()), alone.full_state_dict()

    def leave(world: World) -> Any:
        engine = begun("groups", world)
        go(engine, world, 0, 2)
        return engine.optimizer_state_dict()

    def enter(state: Any, world: World) -> Any:
        engine = begun("groups", world)
        engine.load_full_state_dict(weights)
        engine.optimizers[0].load_state_dict(copy.deepcopy(state))
        engine.load_step_state({"step": 2, "seed": 0, "loss_scale": None})
        go(engine, world, 2, 4)
        return engine.full_state_dict()

    for state in on_ranks(leave, where):
        assert_same(state, plain, 1e-11)
        assert list(state["state"]) == [name for name, _ in alone.model.named_parameters()]
    again = copy.deepcopy(alone.model)
    set_optimizer_state_dict(again, taken := groups(list(again.parameters())), state)
    assert_same(get_optimizer_state_dict(again, taken), plain, 1e-11)
    for batch in batches(4)[2:]:
        alone.step([batch])
    for given in (plain, numbered):
        for found in on_ranks(partial(enter, given), where):
            assert_same(found, alone.full_state_dict(), 1e-11)


class OnDisk:
    """Gives what a file has: a shape, and the regions that are asked for."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.read = values, values.shape, 0

    def __getitem__(self, region: Any) -> Tensor:
        self.read += self.values[region].numel()
        return self.values[region]


def test_a_rank_reads_only_its_own_elements() -> None:
    def program(world: World) -> int:
        engine = begun("groups", world)
        go(engine, world, 0, 1)
        state = engine.optimizer_state_dict()
        lazy = {name: {key: OnDisk(v) for key, v in values.items()} for name, values in state["state"].items()}
        engine = begun("groups", world)
        engine.load_optimizer_state_dict({"state": lazy, "param_groups": state["param_groups"]})
        assert_same(engine.optimizer_state_dict(), state)
        return sum(one["exp_avg"].read for one in lazy.values())

    read = on_ranks(program, "zero3")
    assert sum(read) == sum(p.numel() for p in chain().parameters()) and max(read) < sum(read) / 2


@pytest.mark.parametrize("where", [*STAGES, "tensor"])
def test_pieces_have_every_element_once(where: str) -> None:
    """Frozen parameters, and under the tensor axis parts of fused weights, too."""

    def program(world: World) -> Any:
        model = template("sgd", where)
        for name, p in model.named_parameters():
            p.requires_grad_("norm" not in name)
        engine = world.engine(model)
        go(engine, world, 0, 1)
        state, bare = engine.optimizer_state_dict(), engine.optimizer_state_dict(elements=False)
        assert all(values["exp_avg"].is_meta and float(values["step"]) == 1 for values in bare["state"].values())
        assert bare["param_groups"] == state["param_groups"]
        return list(engine.placed.pieces()), engine.full_state_dict(), state

    ranks = on_ranks(program, where)
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


@each_world("ddp")
def test_the_loss_scale_goes_on_too(world: World) -> None:
    given = LossScale(8.0, interval=2)
    first, second = (begun("sgd", world, loss_scale=given) for _ in range(2))
    go(first, world, 0, 3)
    second.load_step_state(first.step_state())
    scale = second.reducer.loss_scale
    assert scale == first.reducer.loss_scale and (scale.scale, scale.good) == (16.0, 1)
    assert given.scale == 8.0, "each engine has its own"


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize("kind", ["groups", "sgd"])
@each_world(refused=r"begins at step 0, .*engine\.load_step_state")
def test_without_the_step_a_run_is_not_taken_up(world: World, kind: str) -> None:
    first, second = begun(kind, world), begun(kind, world)
    go(first, world, 0, 1)
    second.load_full_state_dict(first.full_state_dict())
    if world.mesh.pipe == 1:
        step(second, world.part(batches(1)[0]))
        second = begun(kind, world)
    second.load_optimizer_state_dict(first.optimizer_state_dict())
    go(second, world, 0, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"seed": 3}, "saved with seed 0, and the engine has seed 3"),
        ({"loss_scale": LossScale(4.0)}, "loss scale None"),
    ],
)
def test_another_seed_or_loss_scale_is_refused(settings: dict[str, Any], text: str) -> None:
    state = {"step": 1, "seed": 0, "loss_scale": None}
    refused(text, lambda world: begun("sgd", world).load_step_state(state), "ddp", **settings)


@pytest.mark.parametrize("where", ["none", "ddp", "zero3", "pipe"])
@each_world(refused=r"AdamW\.state_dict\(\).*only this rank's pieces.*engine\.optimizer_state_dict\(\)")
def test_pieces_are_not_given_out_as_a_state(world: World) -> None:
    engine = begun("groups", world)
    go(engine, world, 0, 1)
    engine.optimizers[0].state_dict()


def other_groups(state: Any) -> None:
    state["param_groups"][0]["params"].append(state["param_groups"][1]["params"].pop())


def of_sgd(state: Any) -> None:
    group = state["param_groups"][0]
    del group["betas"], group["eps"]
    group["momentum"] = 0.9


def surplus(state: Any) -> None:
    state["state"]["head.weight"] = {}


def other_shapes(state: Any) -> None:
    for values in state["state"].values():  # what an AdamW with Adafactor's rows would keep
        values["row_var"] = values["exp_avg"].unsqueeze(0).sum(-1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (other_groups, r"no group of the state has the parameters of group 0 of AdamW, 8 of them \(0\.up\.weight"),
        (of_sgd, r"another optimizer's: its group of .* has no betas, eps, which AdamW needs, but .*lr, .*momentum"),
        (surplus, r"1 parameters that no optimizer of the engine has: head\.weight"),
        (other_shapes, r"'row_var' of .* has shape \(.*not one number per element.*cut=\"tensor\""),
    ],
)
def test_a_state_of_something_else_is_refused(change: Any, text: str) -> None:
    def program(world: World) -> None:
        engine = begun("groups", world)
        go(engine, world, 0, 1)
        state = engine.optimizer_state_dict()
        change(state)
        engine.load_optimizer_state_dict(state)

    refused(text, program, "zero3")


class Odd(torch.optim.SGD):
    """Keeps something that belongs to no element."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (None, r"no optimizer.*engine\.use"),
        (lambda p: elementwise(Odd(p, lr=0.1, momentum=0.9)), r"'history' of '.*' is list"),
        (adamw, "AdamW keeps 'seen', which belongs to no parameter"),
    ],
)
@each_world("zero3")
def test_a_state_that_cannot_be_put_together_is_refused(world: World, optimizer: Any, text: str) -> None:
    engine = world.engine(chain(), optimizer)
    if optimizer:
        engine.backward(loss_sum(engine.model, world.part(batches(1)[0])), count(batches(1)[0]))
        update(engine)
        if optimizer is adamw:
            engine.optimizers[0].state["seen"] = {"batches": 3}
    with pytest.raises((ValueError, RuntimeError), match=text):
        engine.optimizer_state_dict()
