"""Terms that a loss collects over the modules: under a pipeline the other stages' would be missing."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import pytest
from engine_cases import adamw, batches, count, deal, loss_sum
from loop_cases import LAYOUTS, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine


class Router(nn.Module):
    """Leaves a term of the loss behind, as mixture-of-experts layers do."""

    aux: Tensor | float

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 5)
        self.aux = 0.0

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        self.aux = gates.square().sum()
        return x * gates


class Expert(nn.Module):
    aux: Tensor | float

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = Router(), nn.Linear(5, 5)
        self.aux = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.router(x))
        self.aux = self.router.aux
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(4))

    def pipeline_links(self) -> list[str]:
        return [f"blocks.{i}" for i in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_class(model: Any) -> Any:
    return sum(m.aux for m in model.modules() if isinstance(m, Router))


def by_attribute(model: Any) -> Any:
    return sum(m.aux for m in model.modules() if hasattr(m, "aux") and isinstance(m.aux, Tensor)) / 2


def by_name(model: Any) -> Any:
    return sum(m.aux for name, m in model.named_modules() if name.endswith("router"))


def by_block(model: Any) -> Any:
    return sum(block.aux for block in model.blocks)


def by_cleared_block(model: Any) -> Any:
    """They were cleared in the step before, so that each has the attribute."""
    total = sum(block.aux for block in model.blocks)
    for block in model.blocks:
        block.aux = 0.0
    return total


def by_default(model: Any) -> Any:
    return sum(getattr(block, "router", None).aux for block in model.blocks if getattr(block, "router", None))


def by_apply(model: Any) -> Any:
    found: list[Tensor] = []
    model.apply(lambda module: found.append(module.aux) if isinstance(module, Router) else None)
    return sum(found)


def penalty(model: Any) -> Any:
    return 0.01 * sum(p.square().sum() for p in model.parameters())


WAYS = [by_class, by_attribute, by_name, by_block, by_cleared_block, by_default, by_apply]


def trained(where: str, way: Any) -> tuple[list[Any], Any]:
    mesh, row = layout(where)
    template = cases.distinct(Experts())

    def with_terms(model: nn.Module, batch: cases.Batch) -> Tensor:
        return loss_sum(model, batch) + way(model)

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(
            model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=with_terms, count_fn=count
        )
        losses = [engine.step(deal(batch, comm.mesh, comm.rank, 2)).loss for batch in batches(2)]
        return losses, engine.full_state_dict()

    return run(mesh, body, deadline=20), cases.plain(template, batches(2), loss=with_terms)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", [name for name in LAYOUTS if "pipe" not in name])
def test_terms_of_modules_are_the_single_process(where: str, way: Any) -> None:
    ranks, truth = trained(where, way)
    for losses, state in ranks:
        assert losses == pytest.approx(truth.losses, rel=1e-11)
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


@pytest.mark.parametrize("way", [*WAYS, penalty])
@pytest.mark.parametrize("where", ["pipe", "pipe and shard"])
def test_under_a_pipeline_they_are_refused_by_name(where: str, way: Any) -> None:
    with pytest.raises(ValueError, match=r"of 'blocks\.0' belongs to another stage"):
        trained(where, way)


@pytest.mark.parametrize("where", ["pipe", "pipe and shard"])
def test_modules_may_be_walked_before_their_forward(where: str) -> None:
    """To see where the model is, or to clear what it left."""

    def clearing(model: nn.Module, batch: cases.Batch) -> Tensor:
        for module in model.modules():
            module.aux = 0.0  # type: ignore[assignment]
        assert [block.aux for block in model.blocks] == [0.0] * 4  # type: ignore[union-attr]
        return loss_sum(model, {key: value.to(next(model.parameters()).device) for key, value in batch.items()})

    mesh, row = layout(where)
    template = cases.distinct(Experts())

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(
            model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=clearing, count_fn=count
        )
        return [engine.step(deal(batch, comm.mesh, comm.rank, 2)).loss for batch in batches(2)]

    truth = cases.plain(template, batches(2)).losses
    assert all(losses == pytest.approx(truth, rel=1e-11) for losses in run(mesh, body, deadline=20))
