"""The same program on every row and alone: what a user's loop does with its model beside forward, backward and step.

    program(model, optimizer, engine, part, share)

``engine`` is plait's, or ``Alone``, which is plain PyTorch under the same names; ``part`` is what this rank has of a
global batch, and ``share`` what this rank has of a term that is no sum over samples, so that the ranks' add to one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from engine_cases import Batch, count, deal, loss_sum, net, sgd
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.cells import TABLE, Strategy
from plait.table.mesh import Mesh

Program = Callable[[nn.Module, torch.optim.Optimizer, Any, Callable[[Batch], Batch], float], Any]

COPIES = {
    "zero1@cpu": TABLE["zero1"].offloaded(),
    "zero3@cpu": TABLE["zero3"].offloaded(),
    "ddp+bf16": TABLE["ddp"].mixed("bf16"),
    "zero2+bf16": TABLE["zero2"].mixed("bf16"),
    "zero3+bf16": TABLE["zero3"].mixed("bf16"),
}
"""Rows whose optimizer has a copy of the parameters."""

EVERY: dict[str, Strategy] = TABLE | COPIES
WHOLE = [name for name, row in EVERY.items() if not row.params.split]
SPLIT = [name for name, row in EVERY.items() if row.params.split]
MESHES = ["shard=2", "shard=3", "replica=2 shard=2"]


def narrow(row: str) -> bool:
    return row.endswith("bf16")


class Alone:
    """What a program calls of the engine, in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.count = model, 0
        optimizer.register_step_pre_hook(lambda *_: self._divide())
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())

    def backward(self, loss: Tensor, count: int) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.count += count

    def _divide(self) -> None:
        for parameter in self.model.parameters():
            if self.count and parameter.grad is not None:
                parameter.grad /= self.count
        self.count = 0

    def reduce(self, clip: float) -> SimpleNamespace:
        self._divide()
        return SimpleNamespace(grad_norm=torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip).item())

    @contextmanager
    def gathered(self, *names: str, modify: bool = False) -> Iterator[None]:
        yield

    def full_state_dict(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


def model_for(row: str) -> nn.Module:
    """In fp64, or fp32 where the row rounds to 16 bits."""
    return net(2).float() if narrow(row) else net(2)


def alone(program: Program, model: nn.Module) -> Any:
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    seen = program(model, optimizer, engine := Alone(model, optimizer), lambda batch: batch, 1.0)
    return seen, engine.full_state_dict()


def on_ranks(program: Program, model: nn.Module, mesh: str, row: str, **settings: Any) -> list[Any]:
    """What the program returned and the whole state, on every rank."""
    shape = Mesh.parse(mesh)

    def body(comm: Comm) -> Any:
        mine = copy.deepcopy(model)
        optimizer = sgd(mine.parameters())
        engine = Engine(mine, comm, strategy=EVERY[row], optimizer=optimizer, **settings)

        def part(batch: Batch) -> Batch:
            mine = deal(batch, shape, comm.rank, 1)[0]
            return mine | {"x": mine["x"].bfloat16()} if narrow(row) else mine

        seen = program(mine, optimizer, engine, part, 1 / shape.data_size)
        return seen, engine.full_state_dict()

    return run(shape, body, deadline=20)


def data_for(row: str, data: list[Batch]) -> list[Batch]:
    return [{key: value.float() for key, value in batch.items()} for batch in data] if narrow(row) else data


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], row: str) -> bool:
    """Whether two states agree; bf16 has 8 bits, and rounds what it computes with."""
    assert ours.keys() == theirs.keys()
    tolerance = 0.05 if narrow(row) else 1e-11
    return all((ours[n] - theirs[n]).abs().max() <= tolerance * max(1.0, theirs[n].abs().max()) for n in theirs)


WAYS = ["in place", "p.data in place", "p.data replaced", "as one vector"]


def step(model: nn.Module, optimizer: Any, engine: Any, batch: Any) -> None:
    engine.backward(loss_sum(model, batch), count(batch))
    optimizer.step()


def evaluated(model: nn.Module, batch: Any) -> float:
    with torch.no_grad():
        return loss_sum(model, batch | {"x": batch["x"].to(next(model.parameters()).dtype)}).item()


def write(model: nn.Module, how: str) -> None:
    """Clamp the parameters."""
    if how == "as one vector":
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector.clamp(-0.2, 0.2), model.parameters())
        return
    for parameter in model.parameters():
        if how == "in place":
            with torch.no_grad():
                parameter.clamp_(-0.2, 0.2)
        elif how == "p.data in place":
            parameter.data.clamp_(-0.2, 0.2)
        else:
            parameter.data = parameter.data.clamp(-0.2, 0.2)
