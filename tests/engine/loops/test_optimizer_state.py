"""The optimizers' state leaves a layout whole and enters any other; a run goes on there as if it had never moved."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, deal, loss_sum
from tensor_models import model as tensor_model
from tensor_models import token_batches
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from plait.comm import Comm, run
from plait.core.cells import TABLE
from plait.core.mesh import Mesh
from plait.engine import Engine


def chain() -> nn.Module:
    return cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with options of their own, and a schedule's."""
    parameters = list(model.named_parameters())
    decayed = [p for n, p in parameters if p.dim() > 1]
    others = [p for n, p in parameters if p.dim() < 2]
    own = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.02}]
    made = torch.optim.AdamW(own, lr=0.01, eps=1e-4)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5)
    return made


def state_equal(ours: Any, theirs: Any, close: float = 0.0) -> None:
    """All of two states, groups in any order."""
    assert ours["state"].keys() == theirs["state"].keys()
    for name, values in theirs["state"].items():
        assert ours["state"][name].keys() == values.keys(), name
        for key, value in values.items():
            mine = torch.as_tensor(ours["state"][name][key])
            assert mine.shape == torch.as_tensor(value).shape, (name, key)
            assert cases.close(mine, torch.as_tensor(value), close), (name, key)
    for mine, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert mine == other


def plainly(template: nn.Module, make: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = copy.deepcopy(template)
    optimizer = make(model)
    for batch in batches(steps):
        optimizer.zero_grad()
        (loss_sum(model, batch) / count(batch)).backward()
        optimizer.step()
    return model, optimizer


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("shard=1", {"strategy": "ddp"}),
    "ddp": ("shard=2", {"strategy": "ddp"}),
    "zero1": ("shard=3", {"strategy": "zero1"}),
    "zero2 tensors": ("shard=2", {"strategy": "zero2", "cut": "tensor"}),
    "zero3": ("shard=3", {"strategy": "zero3"}),
    "zero3 tensors": ("shard=3", {"strategy": "zero3", "cut": "tensor"}),
    "hsdp": ("replica=2 shard=2", {"strategy": "hsdp"}),
    "psdp": ("replica=2 shard=2", {"strategy": "psdp"}),
    "cpu": ("shard=2", {"strategy": "off: shard/replica | shard/replica | shard/replica | shard/replica @cpu"}),
    "pipe": ("pipe=2 shard=2", {"strategy": "zero3"}),
}


def build(comm: Comm, where: str, make: Any = groups) -> Engine:
    model = chain()
    return Engine(model, comm, optimizer=make(model), loss_fn=loss_sum, count_fn=count, **LAYOUTS[where][1])


def go(engine: Engine, first: int, last: int) -> list[float]:
    """Steps on the same global batches; one microbatch."""
    comm = engine.comm
    return [engine.step(deal(batch, comm.mesh, comm.rank, 1)).loss for batch in batches(last)[first:]]


@pytest.mark.parametrize("where", LAYOUTS)
def test_it_is_what_plain_torch_has_by_name(where: str) -> None:
    def body(comm: Comm) -> Any:
        engine = build(comm, where)
        go(engine, 0, 3)
        return engine.optimizer_state_dict()

    model, optimizer = plainly(chain(), groups, 3)
    truth = get_optimizer_state_dict(model, optimizer)
    for state in run(Mesh.parse(LAYOUTS[where][0]), body, deadline=20):
        state_equal(state, truth, 1e-11)
        assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    again = copy.deepcopy(model)
    taken = groups(again)
    set_optimizer_state_dict(again, taken, state)
    state_equal(get_optimizer_state_dict(again, taken), truth, 1e-11)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_it_enters_any_other_layout_to_the_bit(source: str, target: str) -> None:
    """And the run goes on as it would have: the same losses, but for the order of additions."""

    def leave(comm: Comm) -> Any:
        engine = build(comm, source)
        go(engine, 0, 2)
        saved = copy.deepcopy((engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()))
        return saved, go(engine, 2, 4), engine.full_state_dict(), engine.optimizer_state_dict()

    (saved, losses, weights, state), *_ = run(Mesh.parse(LAYOUTS[source][0]), leave, deadline=20)

    def enter(comm: Comm) -> Any:
        engine = build(comm, target, lambda model: groups(model))
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 7.0  # whatever the new one was built with
        engine.load_full_state_dict(saved[0])
        engine.load_optimizer_state_dict(saved[1])
        engine.load_step_state(saved[2])
        state_equal(engine.optimizer_state_dict(), saved[1])
        assert engine.optimizer is not None and engine.optimizer.param_groups[1]["initial_lr"] == 0.02
        return go(engine, 2, 4), engine.full_state_dict(), engine.optimizer_state_dict()

    for there in run(Mesh.parse(LAYOUTS[target][0]), enter, deadline=20):
        assert there[0] == pytest.approx(losses, rel=1e-11)
        assert all(cases.close(there[1][name], value) for name, value in weights.items())
        state_equal(there[2], state, 1e-11)


@pytest.mark.parametrize("rows", [("zero3", "ddp"), ("ddp", "psdp"), ("zero1", "zero2"), ("psdp", "zero3")])
def test_on_one_mesh_the_run_goes_on_to_the_bit(rows: tuple[str, str]) -> None:
    """With one microbatch all rows add in one order; so a row may be changed in the middle of a run."""

    def body(comm: Comm) -> None:
        first, second = (
            Engine(m := chain(), comm, strategy=row, optimizer=groups(m), loss_fn=loss_sum, count_fn=count)
            for row in rows
        )
        go(first, 0, 2)
        second.load_full_state_dict(first.full_state_dict())
        second.load_optimizer_state_dict(first.optimizer_state_dict())
        second.load_step_state(first.step_state())
        assert go(first, 2, 4) == go(second, 2, 4)
        ours, theirs = second.full_state_dict(), first.full_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        state_equal(second.optimizer_state_dict(), first.optimizer_state_dict())

    run(Mesh(replica=2, shard=2), body, deadline=20)


def mixed(comm: Comm, strategy: str, **settings: Any) -> Engine:
    model = chain().float()
    return Engine(
        model,
        comm,
        strategy=TABLE[strategy].mixed("bf16"),
        optimizer=groups(model),
        loss_fn=lambda m, b: loss_sum(m, {"x": b["x"].bfloat16(), "mask": b["mask"].float()}),
        count_fn=count,
        **settings,
    )


def test_master_weights_move_with_it() -> None:
    """The state is that of the masters, in their dtype; the weights are theirs too."""

    def body(comm: Comm) -> Any:
        first, second = mixed(comm, "zero3"), mixed(comm, "zero1")
        go(first, 0, 2)
        second.load_full_state_dict(first.full_state_dict())
        second.load_optimizer_state_dict(first.optimizer_state_dict())
        second.load_step_state(first.step_state())
        assert go(first, 2, 4) == go(second, 2, 4)
        ours, theirs = second.full_state_dict(), first.full_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        state = second.optimizer_state_dict()
        state_equal(state, first.optimizer_state_dict())
        assert {value.dtype for values in state["state"].values() for value in values.values()} == {torch.float32}

    run(Mesh(shard=3), body, deadline=20)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Muon])
def test_what_looks_at_whole_tensors_moves_between_owners(make: Any) -> None:
    """Adafactor keeps a row and a column for a matrix, which have shapes of their own."""
    widths = (cases.WIDTH, 12, 9, 3)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    template = cases.distinct(nn.Sequential(*layers))

    def engine_of(comm: Comm, row: str) -> Engine:
        model = copy.deepcopy(template)
        optimizer = make(model.parameters(), lr=0.05)
        return Engine(model, comm, strategy=row, cut="tensor", optimizer=optimizer, loss_fn=loss_sum, count_fn=count)

    def leave(comm: Comm) -> Any:
        engine = engine_of(comm, "zero3")
        go(engine, 0, 2)
        saved = copy.deepcopy((engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()))
        go(engine, 2, 3)
        return saved, engine.optimizer_state_dict()

    def enter(comm: Comm) -> Any:
        engine = engine_of(comm, "zero1")
        engine.load_full_state_dict(saved[0])
        engine.load_optimizer_state_dict(saved[1])
        engine.load_step_state(saved[2])
        state_equal(engine.optimizer_state_dict(), saved[1])
        go(engine, 2, 3)
        return engine.optimizer_state_dict()

    (saved, straight), *_ = run(Mesh(shard=3), leave, deadline=20)
    plain_model, plain = plainly(template, lambda m: make(m.parameters(), lr=0.05), 2)
    state_equal(saved[1], get_optimizer_state_dict(plain_model, plain), 1e-9)
    for state in run(Mesh(shard=2), enter, deadline=20):
        state_equal(state, straight, 1e-9)


def test_a_state_with_a_shape_of_its_own_is_refused_where_parameters_are_cut() -> None:
    model, plain = plainly(chain(), lambda m: torch.optim.Adafactor(m.parameters()), 1)

    def body(comm: Comm) -> None:
        build(comm, "zero3", lambda m: torch.optim.AdamW(m.parameters())).load_optimizer_state_dict(state)

    state = get_optimizer_state_dict(model, plain)
    with pytest.raises(ValueError, match=r"'row_var' of .* has shape \(.*not one number per element.*cut=\"tensor\""):
        run(Mesh(shard=3), body, deadline=20)


def test_pieces_of_the_tensor_axis_are_put_together() -> None:
    def leave(comm: Comm, row: str) -> Any:
        model = tensor_model()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        for batch in token_batches(2):
            engine.step(deal(batch, comm.mesh, comm.rank, 1))
        saved = copy.deepcopy((engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()))
        engine.step(deal(token_batches(3)[2], comm.mesh, comm.rank, 1))
        return saved, engine.last.loss, engine.optimizer_state_dict()

    def enter(comm: Comm, row: str) -> Any:
        model = tensor_model()
        engine = Engine(
            model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count
        )
        engine.load_full_state_dict(saved[0])
        engine.load_optimizer_state_dict(saved[1])
        engine.load_step_state(saved[2])
        state_equal(engine.optimizer_state_dict(), saved[1])
        engine.step(deal(token_batches(3)[2], comm.mesh, comm.rank, 1))
        return engine.last.loss, engine.optimizer_state_dict()

    (saved, loss, straight), *_ = run(Mesh.parse("shard=2 tensor=2"), lambda c: leave(c, "zero3"), deadline=20)
    for mesh, row in (("shard=1", "ddp"), ("tensor=3", "ddp"), ("shard=3", "zero1")):
        for there in run(Mesh.parse(mesh), lambda c, row=row: enter(c, row), deadline=20):  # type: ignore[misc]
            assert there[0] == pytest.approx(loss, rel=1e-11)
            state_equal(there[1], straight, 1e-10)


@pytest.mark.parametrize("where", ["zero3", "pipe"])
def test_several_optimizers_are_one_state(where: str) -> None:
    def two(model: nn.Module) -> Any:
        matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.05, momentum=0.9)
        return [matrices, adamw(p for p in model.parameters() if p.dim() < 2)]

    def body(comm: Comm) -> None:
        first, second = build(comm, where, two), build(comm, where, lambda model: two(model)[::-1])
        go(first, 0, 2)
        second.load_full_state_dict(first.full_state_dict())
        second.load_optimizer_state_dict(first.optimizer_state_dict())
        second.load_step_state(first.step_state())
        assert go(first, 2, 4) == go(second, 2, 4)
        ours, theirs = second.optimizer_state_dict(), first.optimizer_state_dict()
        ours["param_groups"].reverse()
        state_equal(ours, theirs)
        assert {key for values in ours["state"].values() for key in values} >= {"momentum_buffer", "exp_avg"}

    run(Mesh.parse(LAYOUTS[where][0]), body, deadline=20)


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
        return list(engine.pieces()), engine.full_state_dict(), state

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


def surplus(state: Any) -> None:
    state["state"]["head.weight"] = {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (other_groups, r"no group of the state has the parameters of group 0 of AdamW, 8 of them \(0\.up\.weight"),
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
        engine = build(comm, "zero3", lambda m: Odd(m.parameters(), lr=0.1, momentum=0.9))
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
