"""The thin face: a user's own forward, backward and step drive the same units to the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import ROWS, adamw, batches, count, deal, loss_sum, net, plain, train
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh

Loop = Callable[[nn.Module, torch.optim.Optimizer, Engine, Comm], Any]


def looped(mesh: str, row: str, loop: Loop, template: nn.Module | None = None, **settings: Any) -> list[Any]:
    """Run a loop of the user's own on every rank; gives (what it returned, the full state)."""
    whole = template or net()

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(whole)
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, **settings)
        return loop(model, optimizer, engine, comm), engine.full_state_dict()

    return run(Mesh.parse(mesh), body, deadline=20)


def script(num_microbatches: int) -> Loop:
    """What a DDP script looks like with plait."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> list[float]:
        losses = []
        for batch in batches(3):
            for part in deal(batch, comm.mesh, comm.rank, num_microbatches):
                engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(engine.last.loss)
        return losses

    return loop


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_zero_grad_between_a_forward_and_its_backward_changes_nothing(row: str) -> None:
    """Where most loops have it; the masks of the microbatches that follow are not those of the first."""

    def loop(zero_grad: bool) -> Loop:
        def body(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> list[Tensor]:
            outputs = []
            for number in range(4):
                outputs.append(model(torch.ones(2, 5, dtype=torch.float64)))
                if zero_grad and number % 2 == 0:
                    optimizer.zero_grad()
                engine.backward(outputs[-1].square().sum(), 2)
                if number % 2:
                    optimizer.step()
            return [output.detach() for output in outputs]

        return body

    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    without, zeroed = (looped("shard=2", row, loop(zero_grad), model) for zero_grad in (False, True))
    for (outputs, state), (expected, expected_state) in zip(zeroed, without, strict=True):
        assert all(map(torch.equal, outputs, expected)) and not torch.equal(outputs[0], outputs[1])
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=1", "shard=3", "replica=2 shard=2"])
def test_equals_the_single_process(mesh: str, row: str) -> None:
    truth = plain(net(), batches(3))
    for losses, state in looped(mesh, row, script(2)):
        assert cases.close(torch.tensor(losses), torch.tensor(truth.losses), 1e-7)
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_equals_engine_step(row: str, microbatches: int) -> None:
    """Up to one rounding: the loop divides the sum, the step divides at birth."""
    steps = train(net(), "replica=2 shard=2", row, batches(3), microbatches=microbatches)
    for (losses, state), record in zip(looped("replica=2 shard=2", row, script(microbatches)), steps, strict=True):
        assert losses == record.losses[:1] + losses[1:], "the first losses come from equal weights"
        assert all(cases.close(state[name], value) for name, value in record.state.items())


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3", "hsdp"])
def test_a_rank_with_nothing_to_count_takes_part(row: str) -> None:
    data = batches(3)
    for batch in data:
        batch["mask"][6:] = 0  # rank 1 of 2 has samples 7 to 12
    truth = plain(net(), data)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> list[float]:
        losses = []
        for batch in data:
            (part,) = deal(batch, comm.mesh, comm.rank, 1)
            engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
            losses.append(engine.last.loss)
        return losses

    for _, state in looped("shard=2", row, loop):
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


def test_clipping_and_last_are_there_in_a_loop_too() -> None:
    truth = plain(net(), batches(1), clip=0.1)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> Any:
        (part,) = deal(batches(1)[0], comm.mesh, comm.rank, 1)
        engine.backward(loss_sum(model, part), count(part))
        optimizer.step()
        return engine.last

    for last, state in looped("shard=2", "zero3", loop, clip=0.1):
        assert (last.step, last.count) == (0, count(batches(1)[0]))
        assert last.grad_norm == pytest.approx(truth.norms[0], rel=1e-12)
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3", "hsdp"])
def test_zero_grad_discards_what_a_loop_does_not_want(row: str) -> None:
    """A bad batch is skipped: backward, zero_grad, and on with the next; as in PyTorch nothing of it is left."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> None:
        bad, good = batches(2)
        for batch in (bad, good):
            if batch is good:
                optimizer.zero_grad()
            (part,) = deal(batch, comm.mesh, comm.rank, 1)
            engine.backward(loss_sum(model, part), count(part))
        optimizer.step()

    truth = plain(net(), batches(2)[1:])
    for _, state in looped("shard=2", row, loop):
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


def test_a_step_without_a_backward_is_refused() -> None:
    with pytest.raises(ValueError, match="without a backward"):
        looped("shard=2", "zero3", lambda model, optimizer, engine, comm: optimizer.step())


def test_a_second_step_without_a_new_backward_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> None:
        engine.backward(loss_sum(model, batches(1)[0]), count(batches(1)[0]))
        optimizer.step()
        optimizer.step()

    with pytest.raises(ValueError, match="without a backward"):
        looped("shard=2", "ddp", loop)


def test_torchs_own_backward_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> None:
        loss_sum(model, batches(1)[0]).backward()

    with pytest.raises(ValueError, match=r"engine\.backward"):
        looped("shard=2", "ddp", loop)


def test_a_graph_is_not_kept_for_a_second_backward() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> None:
        engine.backward(loss_sum(model, batches(1)[0]), 13, retain_graph=True)

    with pytest.raises(ValueError, match=r"call engine\.backward once"):
        looped("shard=2", "ddp", loop)


def test_engine_step_without_loss_and_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_fn and count_fn"):
        looped("shard=2", "ddp", lambda model, optimizer, engine, comm: engine.step([batches(1)[0]]))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    def per_sample(model: nn.Module, batch: cases.Batch) -> Tensor:
        out: Tensor = model(batch["x"]).sum(1)
        return out

    with pytest.raises(ValueError, match=r"shape \(7,\)|shape \(6,\)"):
        train(net(), "shard=2", "ddp", batches(1), loss=per_sample)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_ranks_with_different_numbers_of_microbatches_are_told_at_once(row: str) -> None:
    def body(comm: Comm) -> None:
        model = net()
        engine = Engine(
            model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count
        )
        engine.step([batches(1)[0]] * (1 + comm.rank))

    with pytest.raises(ValueError, match=r"different numbers of microbatches \(1, 2\)"):
        run(Mesh(shard=2), body, deadline=20)


def test_a_step_with_nothing_to_count_is_refused() -> None:
    data = batches(1)
    data[0]["mask"].zero_()
    with pytest.raises(ValueError, match="no target"):
        train(net(), "shard=2", "zero3", data)


@pytest.mark.parametrize("row", ROWS)
def test_an_empty_microbatch_is_as_good_as_any(row: str) -> None:
    """3 samples on 2 ranks with 2 microbatches: one of the four holds none."""
    data = batches(2, samples=3)
    for batch in data:
        batch["mask"][:] = 1
    cases.agree(train(net(), "shard=2", row, data, microbatches=2), plain(net(), data))


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@pytest.mark.parametrize("how", ["detached", "without a graph"])
def test_a_loss_that_needs_no_gradient_is_refused(row: str, how: str) -> None:
    def lost(model: nn.Module, batch: Any) -> Tensor:
        if how == "detached":
            return loss_sum(model, batch).detach()
        with torch.no_grad():
            return loss_sum(model, batch)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> None:
        part = deal(batches(1)[0], comm.mesh, comm.rank, 1)[0]
        with pytest.raises(ValueError, match="the loss needs no gradient"):
            engine.backward(lost(model, part), count(part))

    looped("shard=2", row, loop)
    for mesh in ("shard=2", "pipe=2"):
        with pytest.raises(ValueError, match="the loss needs no gradient"):
            template = cases.distinct(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
            train(template, mesh, row, batches(1), loss=lost)


class Temperature(nn.Module):
    """A module around one parameter, called without anything."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self) -> Tensor:
        return F.dropout(self.log.exp(), 0.5)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_model_that_is_called_without_a_tensor(row: str) -> None:
    """It has no samples to number: its masks belong to the microbatch, each rank's and each forward's its own."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, comm: Comm) -> list[Tensor]:
        outputs = [model() for _ in range(2)]
        for output in outputs:
            engine.backward(output.sum(), count=1)
        optimizer.step()
        return [output.detach() for output in outputs]

    ranks, again = (looped("shard=2", row, loop, Temperature(), bucket=0) for _ in range(2))
    masks = {tuple((output != 0).tolist()) for outputs, _ in ranks for output in outputs}
    assert len(masks) == 4
    assert torch.equal(ranks[0][1]["log"], ranks[1][1]["log"]) and not (ranks[0][1]["log"] == 1).all()
    assert all(
        torch.equal(*pair) for (a, _), (b, _) in zip(ranks, again, strict=True) for pair in zip(a, b, strict=True)
    )
