"""The optimizers' state leaves a layout whole and enters any other; a run goes on there as if it had never moved."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, count, deal, loss_sum
from state_cases import LAYOUTS, build, chain, go, groups, plainly, state_equal
from tensor_models import model as tensor_model
from tensor_models import token_batches
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, elementwise
from plait.table.cells import TABLE
from plait.table.mesh import Mesh


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
@pytest.mark.parametrize("target", [*[*LAYOUTS][1:], *[*LAYOUTS][:1]])  # each value of both: into the next one
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
    model, plain = plainly(chain(), lambda m: torch.optim.AdamW(m.parameters()), 1)

    def body(comm: Comm) -> None:
        build(comm, "zero3", lambda m: torch.optim.AdamW(m.parameters())).load_optimizer_state_dict(state)

    state: Any = get_optimizer_state_dict(model, plain)
    for values in state["state"].values():  # what an AdamW of one's own with Adafactor's rows would keep
        values["row_var"] = values["exp_avg"].unsqueeze(0).sum(-1)
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


@pytest.mark.parametrize("make", [torch.optim.NAdam, Counts])
@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_what_is_no_moment_keeps_its_dtype(make: Any, row: str) -> None:
    """torch would give it the parameter's: here fp64, where NAdam has a product in fp32."""

    def body(comm: Comm) -> Any:
        def begun() -> tuple[Any, Engine]:
            model = cases.distinct(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
            optimizer = elementwise(make(model.parameters(), lr=0.01))
            return model, Engine(model, comm, strategy=row, optimizer=optimizer)

        def go(model: Any, engine: Engine) -> None:
            for batch in cases.batches(3):
                (mine,) = cases.deal(batch, comm.mesh, comm.rank, 1)
                engine.backward(cases.loss_sum(model, mine), cases.count(mine))
                engine.optimizers[0].step()

        model, engine = begun()
        go(model, engine)
        saved, weights, place = engine.optimizer_state_dict(), engine.full_state_dict(), engine.step_state()
        go(model, engine)
        again, resumed = begun()
        resumed.load_step_state(place)
        resumed.load_full_state_dict(weights)
        resumed.load_optimizer_state_dict(saved)
        go(again, resumed)
        return [(one.full_state_dict(), one.optimizer_state_dict()["state"]) for one in (engine, resumed)]

    for (weights, state), (others, found) in run(Mesh(shard=3), body):
        assert all(torch.equal(others[name], value) for name, value in weights.items())
        for name, own in state.items():
            for key, value in own.items():
                assert type(found[name][key]) is type(value)
                if isinstance(value, torch.Tensor):
                    assert found[name][key].dtype == value.dtype and torch.equal(found[name][key], value), (name, key)
                else:
                    assert found[name][key] == value
