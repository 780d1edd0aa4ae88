"""Models that draw random numbers, trained in one process with plait's streams, and under a layout."""

import copy
from collections.abc import Callable
from typing import Any

import engine_cases as cases
from engine_cases import adamw, count, deal, loss_sum
from pipeline_cases import build
from programs import layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.forward.context import CurrentForward, RNGPosition, token_counts
from plait.forward.dropout import DropoutRNG
from plait.forward.interceptor import Interceptor


def unchanged(model: nn.Module, step: int) -> None:
    """Leaves a model alone before a step."""


def one_process(
    template: nn.Module, data: list[cases.Batch], before: Callable[[nn.Module, int], None] = unchanged
) -> tuple[list[float], dict[str, Tensor]]:
    """Plain autograd on the whole batch, and the same streams."""
    model, current = copy.deepcopy(template), CurrentForward()
    Interceptor(current, [DropoutRNG(0, current)]).follow(model)
    optimizer, losses = adamw(model.parameters()), []
    for step, batch in enumerate(data):
        before(model, step)
        current.begin(RNGPosition(step, 0, 0, len(batch["x"]), token_counts(batch, len(batch["x"]))))
        loss = loss_sum(model, batch) / count(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def trained(
    where: str,
    template: nn.Module,
    data: list[cases.Batch],
    microbatches: int = 2,
    before: Callable[[nn.Module, int], None] = unchanged,
    **settings: Any,
) -> Any:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        engine, losses = build(template, comm, strategy=row, **settings), []
        for step, batch in enumerate(data):
            before(engine.model, step)
            losses.append(engine.step(deal(batch, comm.mesh, comm.rank, microbatches)).loss)
        return losses, engine.full_state_dict()

    return run(mesh, body, deadline=20)
