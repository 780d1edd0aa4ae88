"""The programs of users: each is written once, runs in plain PyTorch and under every row, and gives the same.

    def program(world): ...; return engine.full_state_dict()

    check(program, "zero3")            every rank's result is the one of plain PyTorch
    refused("words", program, "pipe")  a ValueError of these words

``world.engine`` gives plait's engine, or ``Alone``, which is plain PyTorch under the same names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import Batch, adamw, count, deal, loss_sum
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.cells import TABLE, Strategy
from plait.table.mesh import Mesh

LAYOUTS: dict[str, tuple[str, str | Strategy]] = {
    "none": ("shard=1", "ddp"),
    "ddp": ("shard=2", "ddp"),
    "zero1": ("shard=3", "zero1"),
    "zero2": ("shard=2", "zero2"),
    "zero3": ("shard=3", "zero3"),
    "zero3_keep": ("shard=2", "zero3_keep"),
    "hsdp": ("replica=2 shard=2", "hsdp"),
    "psdp": ("replica=2 shard=2", "psdp"),
    "hpz": ("replica=2 shard=2", "hpz"),
    "zero1@cpu": ("shard=2", TABLE["zero1"].offloaded()),
    "zero3@cpu": ("shard=2", TABLE["zero3"].offloaded()),
    "ddp+bf16": ("shard=2", TABLE["ddp"].mixed("bf16")),
    "zero2+bf16": ("shard=2", TABLE["zero2"].mixed("bf16")),
    "zero3+bf16": ("shard=3", TABLE["zero3"].mixed("bf16")),
    "pipe": ("pipe=2", "ddp"),
    "pipe and shard": ("pipe=2 shard=2", "zero3"),
    "tensor": ("shard=2 tensor=2", "zero1"),
}
"""A mesh and a row."""

EVERY = [name for name in LAYOUTS if not name.startswith(("pipe", "tensor"))]
COPIES = [name for name in EVERY if "@" in name or "+" in name]
"""The optimizer has a copy of the parameters."""
ALONE = [name for name in EVERY if name not in COPIES]
SPLIT = [name for name in EVERY if name.startswith(("zero3", "hsdp", "psdp", "hpz"))]
WHOLE = [name for name in EVERY if name not in SPLIT]
STAGES = [*ALONE, "pipe", "pipe and shard"]
PIPES = STAGES[-2:]


def layout(where: str) -> tuple[Mesh, str | Strategy]:
    mesh, row = LAYOUTS[where]
    return Mesh.parse(mesh), row


class Alone:
    """The engine's calls, in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], **settings: Any) -> None:
        self.model, self.optimizers, self.count, self.loss = model, optimizers, 0, 0.0
        self.loss_fn, self.clip = settings.get("loss_fn", loss_sum), settings.get("clip")
        self.last: Any = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda one, *_: one.zero_grad())
            optimizer.zero_grad = self._forgetting(optimizer.zero_grad)

    def _forgetting(self, zero_grad: Callable[[], None]) -> Callable[[], None]:
        def zeroed() -> None:
            self.count, self.loss = 0, 0.0
            zero_grad()

        return zeroed

    def backward(self, loss: Tensor, count: int, reduction: str = "sum", also: Sequence[Alone] = ()) -> None:
        loss = loss if reduction == "sum" else loss * count if count else torch.zeros((), requires_grad=True).double()
        loss.backward()
        for one in (self, *also):
            one.count, one.loss = one.count + count, one.loss + loss.item()

    def _before_update(self) -> None:
        if self.count:
            self.reduce(self.clip)

    def reduce(self, clip: float | None = None) -> Any:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.count
        norm = None if clip is None else nn.utils.clip_grad_norm_(self.model.parameters(), clip).item()
        self.last = SimpleNamespace(grad_norm=norm, loss=self.loss / self.count)
        self.count, self.loss = 0, 0.0
        return self.last

    def step(self, parts: Sequence[Batch]) -> Any:
        for part in parts:
            self.backward(self.loss_fn(self.model, part), count(part))
        for optimizer in self.optimizers:
            optimizer.step()
        return self.last

    @contextmanager
    def gathered(self, *names: str, modify: bool = False) -> Iterator[None]:
        yield

    def full_state_dict(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


class World:
    """A rank, or plain PyTorch where there is no ``comm``."""

    def __init__(self, where: str, comm: Comm | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.where, self.comm, self.settings = where, comm, dict(settings or {})
        self.mesh = comm.mesh if comm else Mesh()
        self.rank = comm.rank if comm else 0
        self.place, self.ranks = self.mesh.data_rank(self.rank), self.mesh.data_size
        self.narrow = where.endswith("bf16")

    def engine(self, model: nn.Module, optimizer: Any = adamw, **settings: Any) -> Any:
        """An engine on a copy of a model, in fp32 where the row rounds to 16 bits."""
        model = copy.deepcopy(model).float() if self.narrow else copy.deepcopy(model)
        made = optimizer(list(model.parameters())) if optimizer else []
        several = made if isinstance(made, list) else [made]
        if self.comm is None:
            return Alone(model, several, **settings)
        usual = {"strategy": LAYOUTS[self.where][1], "loss_fn": loss_sum, "count_fn": count}
        return Engine(model, self.comm, optimizer=several or None, **(usual | settings | self.settings))

    def parts(self, batch: Batch, num: int = 1) -> list[Batch]:
        """This rank's microbatches of a global batch."""
        if self.narrow:
            batch = {name: value.float() for name, value in batch.items()}
        parts = deal(batch, self.mesh, self.rank, num)
        cast = self.narrow and self.comm
        return [part | {"x": part["x"].bfloat16()} for part in parts] if cast else parts

    def part(self, batch: Batch) -> Batch:
        return self.parts(batch)[0]


Program = Callable[[World], Any]


class Claims(dict[str, tuple[list[str], Program]]):
    """Programs by name, and the layouts under which each of them is the one of plain PyTorch."""

    def __call__(self, layouts: list[str], *values: Any) -> Callable[[Any], Any]:
        """Adds the program that follows: with each of the values, if there are any, as its first argument."""

        def note(program: Any) -> Any:
            for value in values or (None,):
                name = program.__name__ + ("" if value is None else f" {getattr(value, '__name__', value)}")
                self[name] = layouts, program if value is None else partial(program, value)
            return program

        return note

    def under(self, layouts: list[str]) -> Callable[[Any], Any]:
        """Parametrizes a test over the programs of these layouts."""
        names = [name for name, (own, _) in self.items() if own is layouts]
        names_of, wheres = pytest.mark.parametrize("name", names), pytest.mark.parametrize("where", layouts)
        return lambda test: wheres(names_of(test))

    def check(self, name: str, where: str, tolerance: float = 1e-11) -> None:
        check(self[name][1], where, tolerance)


def update(engine: Any) -> None:
    for optimizer in engine.optimizers:
        optimizer.step()


def step(engine: Any, *parts: Batch, loss: Any = loss_sum) -> float:
    """A step of a program's own loop, and its loss."""
    for part in parts:
        engine.backward(loss(engine.model, part), count(part))
    update(engine)
    return engine.last.loss


def on_ranks(program: Program, where: str, deadline: float = 20, **settings: Any) -> list[Any]:
    """Results of the program on every rank; ``settings`` are those of its engines."""
    return run(layout(where)[0], lambda comm: program(World(where, comm, settings)), deadline=deadline)


def check(program: Program, where: str, tolerance: float = 1e-11, **settings: Any) -> None:
    """Every rank's result is the one of plain PyTorch."""
    wanted = program(World(where))
    for found in on_ranks(program, where, **settings):
        assert_same(found, wanted, 0.05 if where.endswith("bf16") else tolerance)


def assert_same(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Asserts that two results are one: to the bit, or to a tolerance."""
    if isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key], tolerance)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, tolerance)
    elif isinstance(wanted, Tensor):
        assert cases.close(found, wanted, tolerance), (found, wanted)
    else:
        assert found == (pytest.approx(wanted, rel=tolerance) if isinstance(wanted, float) else wanted)


def refused(words: str, program: Program, where: str, **settings: Any) -> None:
    """A ValueError of these words, from the rank that noticed; at a deadline another rank would raise TimeoutError."""
    with pytest.raises(ValueError, match=words):
        on_ranks(program, where, **settings)


def net() -> nn.Module:
    return cases.net(2)


def chain(kind: Callable[[], nn.Module] = cases.Block) -> nn.Module:
    """Four blocks, which two stages share."""
    return cases.distinct(nn.Sequential(*(kind() for _ in range(4))))


class Experts(nn.Sequential):
    """A model that is no list of blocks."""

    def pipeline_links(self) -> list[str]:
        return ["0", "1", "2", "3"]

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x
