"""Shared by the tests of pipelines: chains of links, and the questions that most of them ask.

same(model, "pipe=2 shard=2", "zero3", schedule="zbv")     losses, gradients and weights are plain autograd's
as_one_stage(model, "pipe=2", schedule="zbv")              losses and weights are one stage's, also with dropout
refused("the words", model, ...)                            a ValueError of these words, on a rank, at once
"""

import copy
from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import WIDTH, Batch, Run, adamw, batches, count, deal, distinct, loss_sum
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.step.step import StepResult
from plait.table.mesh import Mesh

LossFn = Callable[[nn.Module, Batch], Tensor]


class Chain(nn.Module):
    """Links named l0, l1, ..., in a row; a module given twice is two links."""

    def __init__(self, *links: nn.Module) -> None:
        super().__init__()
        for number, link in enumerate(links):
            self.add_module(f"l{number}", link)
        self.num_links = len(links)

    def pipeline_blocks(self) -> list[str]:
        return [f"l{number}" for number in range(self.num_links)]

    @property
    def links(self) -> list[nn.Module]:
        return [getattr(self, f"l{number}") for number in range(self.num_links)]

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
        return x


def linear(fan_in: int = WIDTH, fan_out: int = WIDTH) -> nn.Linear:
    return nn.Linear(fan_in, fan_out)


def chain(*links: nn.Module) -> Chain:
    """The links, or four unlike ones; every weight its own number."""
    return distinct(Chain(*(links or (linear(), nn.Tanh(), cases.Block(), linear()))))


def tied(number: int) -> Chain:
    """Linears with one weight and biases of their own."""
    links = [linear() for _ in range(number)]
    for link in links[1:]:
        link.weight = links[0].weight
    return chain(*links)


def same(
    model: nn.Module,
    mesh: str = "pipe=2",
    row: str = "ddp",
    *,
    data: list[Batch] | None = None,
    loss: LossFn = loss_sum,
    optimizer: cases.MakeOptimizer = adamw,
    microbatches: int = 3,
    **settings: Any,
) -> list[Run]:
    """Trains it in both ways, compares everything, and returns the ranks' runs."""
    data = batches(2) if data is None else data
    truth = cases.plain(model, data, optimizer, loss, settings.get("clip"))
    ranks = cases.train(model, mesh, row, data, optimizer, loss, microbatches, **settings)
    cases.agree(ranks, truth)
    return ranks


def refused(words: str, model: nn.Module, mesh: str = "pipe=2", row: str = "ddp", **settings: Any) -> None:
    """A ValueError of these words, from the rank that noticed; at a deadline another rank would raise TimeoutError."""
    microbatches = settings.pop("microbatches", 3)
    with pytest.raises(ValueError, match=words):
        cases.train(model, mesh, row, batches(1), microbatches=microbatches, **settings)


def engine_on(model: nn.Module, comm: Comm, **settings: Any) -> Engine:
    """An engine on this very model."""
    optimizer = settings.pop("optimizer", adamw)(model.parameters())
    usual: dict[str, Any] = {"strategy": "ddp", "loss_fn": loss_sum, "count_fn": count}
    return Engine(model, comm, optimizer=optimizer, **(usual | settings))


def build(template: nn.Module, comm: Comm, **settings: Any) -> Engine:
    """An engine on a copy of the template."""
    return engine_on(copy.deepcopy(template), comm, **settings)


def step(engine: Engine, batch: Batch, microbatches: int = 4) -> StepResult:
    """A step on this rank's part of a global batch."""
    return engine.step(deal(batch, engine.comm.mesh, engine.comm.rank, microbatches))


def on(mesh: str, body: Callable[[Comm], Any], deadline: float = 20) -> list[Any]:
    """The body's results on thread ranks."""
    return run(Mesh.parse(mesh), body, deadline=deadline)


def as_one_stage(template: nn.Module, mesh: str, num: int = 4, **settings: Any) -> None:
    """Two steps on the mesh have the losses and the weights of one stage, also where the model draws."""

    def body(comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
        engine = build(template, comm, **(settings if comm.mesh.pipe > 1 else settings | {"schedule": None}))
        return [step(engine, batch, num).loss for batch in batches(2)], engine.full_state_dict()

    losses, weights = on(f"shard={Mesh.parse(mesh).shard}", body)[0]
    for found, state in on(mesh, body):
        assert found == pytest.approx(losses, abs=1e-12)
        assert all(cases.close(state[name], value) for name, value in weights.items())


def tokens(samples: int = 13, length: int = 4) -> list[Batch]:
    """Batches of int64 [samples, length]."""
    generator = torch.Generator().manual_seed(3)
    ones = torch.ones(samples, dtype=torch.float64)
    return [{"x": torch.randint(0, 11, (samples, length), generator=generator), "mask": ones} for _ in range(2)]
