"""The norm is global: every element counts once, whoever holds it and however often."""

from __future__ import annotations

import math

import engine_cases as cases
import pytest
import torch
from engine_cases import ROWS, agree, batches, net, plain, sgd, train

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.step.norm import clip_factor
from plait.table.mesh import Mesh


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=1", "replica=2", "shard=3", "replica=2 shard=2"])
def test_norm_and_clipped_steps_are_those_of_clip_grad_norm(mesh: str, row: str) -> None:
    truth = plain(net(), batches(3), optimizer=sgd, clip=0.5)
    assert all(norm is not None and norm > 0.5 for norm in truth.norms), "nothing would be clipped"
    agree(train(net(), mesh, row, batches(3), optimizer=sgd, clip=0.5, microbatches=2), truth)


@pytest.mark.parametrize("row", ["ddp", "zero2", "hsdp"])
@pytest.mark.parametrize("cut", ["element", "tensor"])
def test_a_limit_above_the_norm_changes_no_bit(row: str, cut: str) -> None:
    free = train(net(), "replica=2 shard=2", row, batches(), optimizer=sgd, cut=cut)
    loose = train(net(), "replica=2 shard=2", row, batches(), optimizer=sgd, cut=cut, clip=1e6)
    endless = train(net(), "replica=2 shard=2", row, batches(), optimizer=sgd, cut=cut, clip=math.inf)
    for a, b, c in zip(free, loose, endless, strict=True):
        assert a.norms == [None, None] and b.norms == c.norms and None not in b.norms
        assert all(torch.equal(a.state[n], b.state[n]) and torch.equal(a.state[n], c.state[n]) for n in a.state)


@pytest.mark.parametrize("row", ROWS)
def test_every_rank_sees_one_norm(row: str) -> None:
    ranks = train(net(), "replica=2 shard=2", row, batches(), clip=0.5)
    assert len({tuple(record.norms) for record in ranks}) == 1


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_frozen_and_unused_parameters_are_not_in_the_norm(row: str) -> None:
    template = net()
    template.first.requires_grad_(False)
    template.register_parameter("unused", torch.nn.Parameter(torch.ones(50, dtype=torch.float64)))
    agree(
        train(template, "shard=3", row, batches(), optimizer=sgd, clip=0.5),
        plain(template, batches(), optimizer=sgd, clip=0.5),
    )


@pytest.mark.parametrize("row", ["ddp", "zero3", "hsdp"])
def test_what_a_listener_changes_is_in_the_norm(row: str) -> None:
    def louder(event: str, engine: Engine) -> None:
        for piece in engine.placed.owned if event == "reduced" else ():
            if piece.name == "head.weight":
                piece.gradient.mul_(20)

    def body(comm: Comm) -> tuple[dict[str, torch.Tensor], float | None]:
        model = net()
        optimizer = sgd(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, clip=0.5, listener=louder)
        (part,) = cases.deal(batches(1)[0], comm.mesh, comm.rank, 1)
        engine.backward(cases.loss_sum(model, part), cases.count(part))
        optimizer.step()
        return engine.full_state_dict(), engine.last.grad_norm

    alone, batch = net(), batches(1)[0]
    (cases.loss_sum(alone, batch) / cases.count(batch)).backward()
    alone.head.weight.grad.mul_(20)  # type: ignore[union-attr, operator]
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    sgd(alone.parameters()).step()
    for state, measured in run(Mesh.parse("replica=2 shard=2"), body, deadline=20):
        assert measured == pytest.approx(norm.item(), rel=1e-9)
        assert all(cases.close(state[name], value) for name, value in alone.state_dict().items())


def test_the_factor_is_torchs() -> None:
    for norm in (0.0, 1e-9, 0.3, 1.0, 7.0):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.tensor([norm], dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        assert math.isclose(parameter.grad.item(), norm * clip_factor(norm, 0.5), rel_tol=1e-15)


def test_the_norm_is_summed_in_fp64_and_rounded_once() -> None:
    """A million small squares beside a large one vanish in an fp32 sum, not in this one."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = torch.nn.Parameter(torch.zeros(1 << 20)), torch.nn.Parameter(torch.zeros(1))

        def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
            return 0.5 + x_BC[:, :1] * 0 + self.small.sum() * 0.001 + self.large * 4096

    def loss(model: torch.nn.Module, batch: cases.Batch) -> torch.Tensor:
        return model(batch["x"].float()).sum() * batch["mask"].sum().float() / batch["mask"].numel()

    ranks = train(Wide(), "shard=1", "ddp", batches(1), loss=loss, clip=math.inf)
    small = torch.tensor(0.001, dtype=torch.float32).double().item()
    exact = math.sqrt((1 << 20) * small**2 + 4096.0**2)
    assert ranks[0].norms[0] == pytest.approx(exact, rel=1e-6) and ranks[0].norms[0] != 4096.0
    assert torch.tensor(ranks[0].norms[0]).item() == ranks[0].norms[0], "a number that fp32 can hold"
