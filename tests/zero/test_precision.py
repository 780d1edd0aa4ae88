"""Mixed precision: the dtype of each kind of state, and its bytes and messages, as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import ROWS, Made, Net
from pipeline_cases import build
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.predict.cost import differences, predict_step
from plait.predict.memory import held
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

BF16, KEPT = torch.bfloat16, {"turn": torch.complex64}


def kinds() -> nn.Module:
    """A real weight, a complex one, and a frozen list of indices, in one unit."""
    kept = nn.Parameter(torch.tensor([0, 3, 2, 5]), requires_grad=False)
    turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    run = lambda m, x_BC: (m.first(x_BC)[:, m.kept].to(m.turn.dtype) @ m.turn).abs()  # noqa: E731
    return Made(run, first=nn.Linear(5, 6), kept=kept, turn=turn)


def engine_on(template: nn.Module, comm: Comm, strategy: Any) -> Engine:
    functions = {"loss_fn": lambda m, x: m(x.to(BF16)).float().square().sum(), "count_fn": len}
    return build(template, comm, strategy=strategy, clip=0.1, **functions)


CASES = [(Net, row, offload) for row in ROWS for offload in (False, True)]
CASES += [(kinds, row, False) for row in ("ddp", "zero2", "zero3")]


@pytest.mark.parametrize(("kind", "row", "offload"), CASES)
def test_state_lies_in_the_dtypes_of_the_row_and_is_predicted(kind: Any, row: str, offload: bool) -> None:
    torch.manual_seed(0)
    template, strategy = kind(), TABLE[row].mixed("bf16")
    strategy = strategy.offloaded() if offload else strategy

    def body(comm: Comm) -> None:
        engine = engine_on(template, comm, strategy)
        assert all(p.dtype == KEPT.get(n, BF16) for n, p in engine.model.named_parameters() if p.requires_grad)
        comm.ledger.clear()
        engine.step(list(torch.linspace(-1, 1, 30).add(comm.rank).view(2, 3, 5)))
        sent = [entry for entry in comm.ledger.entries if entry.note.phase != "setup"]
        assert not differences(predict_step(engine.placed.layouts(), comm.mesh, strategy, 2, comm.rank), sent)
        for piece in engine.placed.owned:
            due = KEPT.get(piece.name, torch.float32)
            assert {
                piece.view.dtype,
                piece.gradient.dtype,
                engine.optimizers[0].state[piece.view]["exp_avg"].dtype,
            } == {due}
        ahead, kept = held(engine.placed.layouts(), comm.mesh, strategy, comm.rank, 2), engine.placed.bytes_held()
        assert (kept["params"], kept["grads"], kept["optimizer"]) == (ahead.params, ahead.grads, ahead.optimizer)

    run(Mesh(replica=2, shard=2), body, deadline=20)


def test_a_row_may_not_narrow_what_it_sums() -> None:
    row = "x: full | full | full fp32, pending(shard, replica) | full fp32"
    with pytest.raises(ValueError, match="fewer bits"):
        run(Mesh(), lambda comm: engine_on(Net().double(), comm, row), deadline=20)
