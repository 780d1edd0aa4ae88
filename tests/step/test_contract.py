"""The calls of a program's own loop, in any order: each is right, or one error that says what was forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import batches, count, deal, loss_sum
from torch import Tensor, nn

from plait import run_threads
from plait.comm import Comm
from plait.step import Engine, elementwise

ROWS = ["ddp", "zero1", "zero3"]
State = dict[str, Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def hooked(engine: Engine, model: nn.Module) -> Callable[[], None]:
    engine.use(adamw(model.parameters()))
    return engine.optimizers[0].step


def on_pieces(engine: Engine, model: nn.Module) -> Callable[[], None]:
    engine.use(adamw(engine.parameters()))
    return engine.optimizers[0].step


def by_hand(engine: Engine, model: nn.Module) -> Callable[[], None]:
    optimizer = adamw(engine.parameters())

    def step() -> None:
        engine.reduce()
        optimizer.step()
        engine.publish()

    return step


def reduced_before(engine: Engine, model: nn.Module) -> Callable[[], None]:
    engine.use(adamw(model.parameters()))

    def step() -> None:
        engine.reduce(clip=1e9)
        engine.optimizers[0].step()

    return step


def trained(row: str, way: Any, steps: int = 5) -> list[State]:
    template = cases.net(2)

    def body(comm: Comm) -> State:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy=row, clip=1e9)
        step = way(engine, model)
        for batch in batches(steps):
            for part in deal(batch, comm.mesh, comm.rank, 2):
                engine.backward(loss_sum(model, part), count(part))
            step()
        assert engine.steps == steps
        return engine.full_state_dict()

    return run_threads("shard=2", body, deadline=20)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("way", [on_pieces, by_hand, reduced_before])
def test_every_way_to_make_a_step_has_the_same_bits(way: Any, row: str) -> None:
    for mine, wanted in zip(trained(row, way), trained(row, hooked), strict=True):
        assert all(torch.equal(mine[name], value) for name, value in wanted.items())


def in_a_loop(body: Callable[[Engine, nn.Module, torch.optim.Optimizer, Callable[[], None]], None]) -> None:
    """Calls ``body`` on two ranks; its last argument runs a forward and a backward."""

    def rank(comm: Comm) -> None:
        model = cases.distinct(cases.net(2))
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer)
        (part,) = deal(batches(1)[0], comm.mesh, comm.rank, 1)
        body(engine, model, optimizer, lambda: engine.backward(loss_sum(model, part), count(part)))

    run_threads("shard=2", rank, deadline=20)


def test_a_call_that_is_forgotten_or_doubled_says_so() -> None:
    def body(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
        for call in (engine.reduce, optimizer.step):
            with pytest.raises(ValueError, match="without a backward before it"):
                call()
        with pytest.raises(ValueError, match=r"without engine\.reduce\(\)"):
            engine.publish()
        backward()
        with pytest.raises(ValueError, match=r"without engine\.reduce\(\)"):
            engine.publish()
        engine.reduce()
        with pytest.raises(ValueError, match="a second time in one step"):
            engine.reduce()
        with pytest.raises(ValueError, match=r"engine\.backward after engine\.reduce"):
            backward()
        optimizer.step()
        with pytest.raises(ValueError, match=r"without engine\.reduce\(\)"):
            engine.publish()
        assert engine.steps == 1

    in_a_loop(body)


def test_zero_grad_after_reduce_throws_the_step_away() -> None:
    def body(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
        before = engine.full_state_dict()
        backward()
        engine.reduce()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="without a backward before it"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        backward()
        optimizer.step()
        assert engine.steps == 1

    in_a_loop(body)


class Failing(torch.optim.AdamW):
    """Its next step raises, before it updates anything, where ``fails`` says so."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError("no memory for the state")
        return super().step(closure)


@pytest.mark.parametrize("then", ["again", "zero_grad"])
@pytest.mark.parametrize("row", ROWS)
def test_after_an_update_that_raised_the_next_one_is_published(row: str, then: str) -> None:
    template = cases.net(2)

    def body(comm: Comm, make: Any) -> State:
        model = copy.deepcopy(template)
        optimizer = elementwise(make(model.parameters(), lr=0.01, eps=1e-4))
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for number, batch in enumerate(batches(3)):
            (part,) = deal(batch, comm.mesh, comm.rank, 1)
            engine.backward(loss_sum(model, part), count(part))
            if make is Failing and not number:
                optimizer.fails = True
                with pytest.raises(MemoryError):
                    optimizer.step()
                if then == "zero_grad":
                    optimizer.zero_grad()
                    engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
        return engine.full_state_dict()

    wanted = run_threads("shard=2", lambda comm: body(comm, torch.optim.AdamW), deadline=20)[0]
    for state in run_threads("shard=2", lambda comm: body(comm, Failing), deadline=20):
        assert all(torch.equal(value, wanted[name]) for name, value in state.items())


@pytest.mark.parametrize("row", ROWS)
def test_a_backward_that_raised_leaves_nothing_of_its_step(row: str) -> None:
    template = cases.net(2)

    def body(comm: Comm, fails: bool) -> State:
        model = copy.deepcopy(template)
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for number, batch in enumerate(batches(3)):
            parts = deal(batch, comm.mesh, comm.rank, 2)
            if fails and number == 1:
                engine.backward(loss_sum(model, parts[0]), count(parts[0]))
                loss = loss_sum(model, parts[1])
                loss.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(loss, count(parts[1]))
            for part in parts:
                engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
        return engine.full_state_dict()

    wanted = run_threads("shard=2", lambda comm: body(comm, False), deadline=20)[0]
    for state in run_threads("shard=2", lambda comm: body(comm, True), deadline=20):
        assert all(torch.equal(value, wanted[name]) for name, value in state.items())


@pytest.mark.parametrize("row", ROWS)
def test_parameters_without_an_optimizer_stay_for_as_many_steps_as_there_are(row: str) -> None:
    """Sanitizers work in the first steps only, and leave nothing behind."""
    template = cases.net(2)

    def body(comm: Comm) -> State:
        model = copy.deepcopy(template)
        optimizer = adamw(model.head.parameters())  # type: ignore[union-attr]
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for batch in batches(6):
            (part,) = deal(batch, comm.mesh, comm.rank, 1)
            engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
        return engine.full_state_dict()

    for state in run_threads("shard=2", body, deadline=20):
        stay = [name for name, value in template.state_dict().items() if torch.equal(state[name], value)]
        assert stay == [name for name in state if not name.startswith("head")]


def test_engine_step_needs_the_optimizer_of_the_pieces() -> None:
    def body(comm: Comm) -> None:
        engine = Engine(cases.distinct(cases.net(2)), comm, strategy="zero3", loss_fn=loss_sum, count_fn=count)
        adamw(engine.parameters())
        engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 1))

    with pytest.raises(ValueError, match=r"call engine\.use\(optimizer\)"):
        run_threads("shard=2", body, deadline=20)


@pytest.mark.parametrize("row", ROWS)
def test_the_state_of_an_optimizer_on_pieces_has_every_parameter(row: str) -> None:
    template = cases.net(2)

    def body(comm: Comm, way: Any) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy=row)
        step = way(engine, model)
        (part,) = deal(batches(1)[0], comm.mesh, comm.rank, 1)
        engine.backward(loss_sum(model, part), count(part))
        step()
        return engine.optimizer_state_dict()

    mine, wanted = (run_threads("shard=2", lambda comm, w=w: body(comm, w), deadline=20) for w in (on_pieces, hooked))
    for one, other in zip(mine, wanted, strict=True):
        assert [g["params"] for g in one["param_groups"]] == [g["params"] for g in other["param_groups"]]
        assert one["state"].keys() == other["state"].keys()
        for name, state in other["state"].items():
            assert all(torch.equal(one["state"][name][key], value) for key, value in state.items())
