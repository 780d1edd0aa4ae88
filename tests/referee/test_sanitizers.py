"""The schedule of the sanitizers: the first three steps and every hundredth; between them they do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from plait import run_threads
from plait.comm import Comm
from plait.referee.sanitize import Sanitizers, sanitized
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
