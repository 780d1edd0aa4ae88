"""A world from outside: everything that every world must do, and a step of the engine."""

from collections.abc import Callable
from typing import Any

import comm_checks
import engine_cases as cases
import pytest
import torch
from board import Board, BoardComm

from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh


def on_board(mesh: str, body: Callable[[Comm], Any]) -> list[Any]:
    """One thread per rank; each has a comm of the board."""
    board = Board(Mesh.parse(mesh))
    return run(board.mesh, lambda comm: body(BoardComm(board, comm.rank)), deadline=20)


@pytest.mark.parametrize("mesh", ["shard=3", "shard=2 replica=2"])
@pytest.mark.parametrize("check", comm_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_it_does_what_every_world_does(mesh: str, check: Callable[[Comm], None]) -> None:
    on_board(mesh, check)


@pytest.mark.parametrize("row", ["zero3", "hsdp"])
def test_a_step_of_the_engine_has_the_bits_of_the_thread_world(row: str) -> None:
    batch = cases.batches(steps=1)[0]

    def train(comm: Comm) -> dict[str, torch.Tensor]:
        model = cases.net()
        optimizer = cases.adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=cases.loss_sum, count_fn=cases.count)
        engine.step(cases.deal(batch, comm.mesh, comm.rank, 2))
        return engine.full_state_dict()

    mesh = "replica=2 shard=2"
    for mine, theirs in zip(on_board(mesh, train), run(Mesh.parse(mesh), train), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
