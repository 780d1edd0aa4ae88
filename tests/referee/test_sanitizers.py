"""The schedule of the sanitizers: the first three steps and every hundredth; between them they do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from plait import run_threads
from plait.comm import Comm
from plait.referee.sanitize import Sanitizers, sanitized
from plait.referee.sanitize.written import WatchedHook
from plait.step import Engine


def sanitizers_of(comm: Comm) -> tuple[Engine, Sanitizers]:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    engine = Engine(model, comm, strategy="zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    (one,) = engine._watchers
    assert isinstance(one, Sanitizers)
    return engine, one


def test_they_work_in_the_first_steps_and_in_every_hundredth() -> None:
    def body(comm: Comm) -> list[int]:
        engine, sanitizers = sanitizers_of(comm)
        worked: list[Any] = []
        sanitizers._all = [lambda event, engine: worked.append((engine.number, event))]
        for number in range(201):
            stand_in: Any = SimpleNamespace(optimizers=engine.optimizers, number=number)
            sanitizers("begun", stand_in)
            sanitizers("reduced", stand_in)
        assert [number for number, event in worked if event == "off"] == [3, 101]
        return [number for number, event in worked if event == "reduced"]

    assert run_threads("shard=1", body) == [[0, 1, 2, 100, 200]]


def test_a_world_has_them_once_and_only_where_they_are_wanted() -> None:
    assert run_threads("shard=1", lambda comm: sanitized(comm).engine_watchers) == [(Sanitizers,)]
    assert run_threads("shard=1", lambda comm: comm.engine_watchers, sanitize=False) == [()]


def test_a_programs_hook_is_not_watched_between_these_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    seen = WatchedHook._seen

    def counted(self: WatchedHook, optimizer: torch.optim.Optimizer) -> list[str]:
        looks.append(1)
        return seen(self, optimizer)

    monkeypatch.setattr(WatchedHook, "_seen", counted)

    def body(comm: Comm) -> list[int]:
        engine, _ = sanitizers_of(comm)
        engine.optimizers[0].register_step_pre_hook(lambda *_: None)
        per_step = []
        for _ in range(5):
            before = len(looks)
            engine.backward(engine.model(torch.ones(2, 3)).sum(), 2)
            engine.optimizers[0].step()
            comm.barrier(("shard",))
            per_step.append(len(looks) - before)
            comm.barrier(("shard",))
        return per_step

    for of_rank in run_threads("shard=2", body, deadline=20):
        assert of_rank == [4, 4, 4, 0, 0]
