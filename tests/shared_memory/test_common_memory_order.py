"""When common memory is written and read: no rank reads what another has not written, or writes what another reads."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import batches, count, deal, distinct, loss_sum
from shared_worlds import play
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from plait.comm import run
from plait.shared_memory.common import CommonMemory
from plait.step import Engine, elementwise
from plait.table.mesh import Mesh


def comes_to_the_same(mesh: str, body: Callable[..., Any], **threads: Any) -> None:
    """Compares results of ``body(comm)`` over common memory with those of threads, given ``threads``, to the bit."""
    expected, spec = tree_flatten(run(Mesh.parse(mesh), lambda comm: body(comm, **threads))[0])
    for result in play(mesh, body):
        found, same = tree_flatten(result)
        assert same == spec, result
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, expected, strict=True))


def net(last: type[nn.Linear] = nn.Linear) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), last(7, 3))


def engine_of(comm: Any, model: nn.Module, row: str, optimizer: Any = None) -> tuple[nn.Module, Any, Engine]:
    model = distinct(model)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)


class SlowToUpdate(torch.optim.SGD):
    """Writes to the parameters a while after the others have."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


@pytest.mark.parametrize("mesh", ["shard=3", "replica=2 shard=2", "replica=2 shard=2 hosts=2"])
def test_parameters_are_read_when_all_have_written_them(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank updates late, with two optimizers, and the others go on to the next step meanwhile; none of their
    gathers waits twice for a rank."""
    shape, told, heard = Mesh.parse(mesh), [], CommonMemory.silent
    monkeypatch.setattr(CommonMemory, "silent", lambda self, n: told.append(found := heard(self, n)) or found)

    def body(comm: Any, seconds: float = 0.15) -> tuple[list[float], Any]:
        model = distinct(net())
        optimizers = [elementwise(SlowToUpdate(layer.parameters(), lr=0.1)) for layer in (model[0], model[2])]
        for optimizer in optimizers:
            optimizer.seconds = seconds if comm.rank == 1 else 0.0
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizers, loss_fn=loss_sum, count_fn=count)
        losses = [engine.step(deal(batch, shape, comm.rank, 2)).loss for batch in batches(3)]
        return losses, engine.full_state_dict()

    comes_to_the_same(mesh, body, seconds=0.0)
    assert any(told) and not all(told)


@pytest.mark.parametrize("row", ["zero2", "zero3", "psdp"])
def test_sums_that_are_thrown_away_do_not_come_into_the_next_ones(row: str) -> None:
    """Sums that were under way when ``zero_grad`` came end before the next begin."""
    shape = Mesh(shard=3)

    def body(comm: Any, discards: bool = True) -> Any:
        layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)), nn.Linear(5, 3))
        model, optimizer, engine = engine_of(comm, layers, row)
        for batch in batches(8):
            (mine,) = deal(batch, shape, comm.rank, 1)
            if discards:
                engine.backward(-100 * loss_sum(model, mine), count(mine))
                optimizer.zero_grad()
            engine.backward(loss_sum(model, mine), count(mine))
            optimizer.step()
        return engine.full_state_dict()

    comes_to_the_same("shard=3", body, discards=False)


class SlowToRead(nn.Linear):
    """Reads its parameters a while after its forward has begun."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def clamp(engine: Any, optimizers: Any) -> None:
    """Each rank clamps its own pieces, late on one of them."""
    time.sleep(0.05 * (engine.comm.rank == 1))
    for group in (group for one in optimizers for group in one.param_groups):
        for piece in group["params"]:
            piece.clamp_(-0.2, 0.2)


READS = {
    "between clipping and the update": "clip read step",
    "after a write to what the optimizers have": "step clamp read",
    "in front of a write to what the optimizers have": "step read clamp read",
    "nowhere: the state alone": "step clamp",
}


@pytest.mark.parametrize("when", READS)
@pytest.mark.parametrize("row", ["zero3", "hpz"])
def test_a_forward_at_any_place_reads_what_is_due(row: str, when: str) -> None:
    """One rank reads late, and writes late."""
    shape = Mesh.parse("replica=2 shard=2")

    def body(comm: Any, seconds: float = 0.05) -> Any:
        late = seconds if comm.rank == 1 else 0.0
        model = distinct(net(SlowToRead))
        optimizers = [elementwise(SlowToUpdate(layer.parameters(), lr=0.1)) for layer in (model[0], model[2])]
        engine, seen = Engine(model, comm, strategy=row, optimizer=optimizers), []
        x = torch.linspace(-1, 1, 10).double().view(2, 5)

        def read() -> None:
            model[2].seconds = late
            seen.append(model(x))
            model[2].seconds = 0.0

        acts: dict[str, Callable[[], Any]] = {
            "clip": lambda: engine.reduce(clip=1.0),
            "step": lambda: [optimizer.step() for optimizer in optimizers],
            "clamp": lambda: clamp(engine, optimizers),
            "read": read,
        }
        for batch in batches(3):
            (mine,) = deal(batch, shape, comm.rank, 1)
            optimizers[1].seconds = late
            engine.backward(loss_sum(model, mine), count(mine))
            with torch.no_grad():
                for act in READS[when].split():
                    acts[act]()
        return seen, engine.full_state_dict()

    comes_to_the_same("replica=2 shard=2", body, seconds=0.0)


@pytest.mark.parametrize("row", ["zero3", "zero3_keep", "hpz"])
def test_a_step_that_was_given_up_leaves_nothing_behind(row: str) -> None:
    """A forward without its backward; then every rank halves the parameters, and keeps what it sees."""

    def body(comm: Any) -> Any:
        model, optimizer, engine = engine_of(comm, net(), row)
        x = batches(1)[0]["x"]
        before = engine.full_state_dict()
        loss_sum(model, batches(1)[0])
        optimizer.zero_grad()
        with engine.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            time.sleep(0.05)
        loss = loss_sum(model, batches(1)[0])
        with engine.gathered():
            kept = dict(model.state_dict())
        engine.backward(loss, 1)
        optimizer.step()
        return before, kept, model(x).detach(), engine.full_state_dict()

    for result in play("replica=2 shard=2", body):
        assert isinstance(result, tuple), result
        assert all(torch.equal(result[1][name], value / 2) for name, value in result[0].items())
    comes_to_the_same("replica=2 shard=2", body)


def test_where_all_is_gathered_ranks_may_run_other_numbers_of_forwards() -> None:
    """As they do when they generate texts of other lengths; then they train on."""
    shape = Mesh.parse("shard=2")

    def body(comm: Any) -> Any:
        model, optimizer, engine = engine_of(comm, net(), "zero3")
        for batch in batches(2):
            with engine.gathered(), torch.no_grad():
                for _ in range(1 + 2 * comm.rank):
                    model(batch["x"])
            (mine,) = deal(batch, shape, comm.rank, 1)
            engine.backward(loss_sum(model, mine), count(mine))
            optimizer.step()
        return engine.full_state_dict()

    comes_to_the_same("shard=2", body)
