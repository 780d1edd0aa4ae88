"""Mixed precision: what is kept in which dtype, what a wider sum saves, and steps that are left out."""

from __future__ import annotations

import pytest
import torch
from engine_cases import ROWS, Net
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.predict.cost import differences, predict_step
from plait.predict.memory import held
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

MESH = Mesh(replica=2, shard=2)
BF16 = torch.bfloat16


def loss_sum(model: nn.Module, x_BD: Tensor) -> Tensor:
    return torch.as_tensor(model(x_BD.to(next(model.parameters()).dtype)).float().square().sum())


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(step: int, data_rank: int, num: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return [torch.randn(3, 5, generator=generator) for _ in range(num)]


@pytest.mark.parametrize("offload", [False, True], ids=["here", "cpu"])
@pytest.mark.parametrize("row", ROWS)
def test_state_lies_in_the_dtypes_of_the_row_and_its_bytes_are_predicted(row: str, offload: bool) -> None:
    strategy = TABLE[row].mixed("bf16")
    strategy = strategy.offloaded() if offload else strategy
    models = [net() for _ in range(MESH.size)]

    def rank_main(comm: Comm) -> None:
        model = models[comm.rank]
        engine = Engine(model, comm, strategy=strategy, optimizer=adam(model), loss_fn=loss_sum, count_fn=len, clip=0.1)
        assert all(p.dtype == BF16 for p in model.parameters())
        for step in range(2):
            engine.step(batches(step, comm.rank))
        for piece in engine.placed.owned:
            assert piece.view.dtype == piece.gradient.dtype == torch.float32
        assert engine.optimizer is not None
        assert all(s["exp_avg"].dtype == torch.float32 for s in engine.optimizer.state.values())
        ahead, kept = held(engine.placed.layouts(), comm.mesh, strategy, comm.rank, 2), engine.placed.bytes_held()
        assert (kept["params"], kept["grads"], kept["optimizer"]) == (ahead.params, ahead.grads, ahead.optimizer)

    run(MESH, rank_main, deadline=20)


def test_a_row_may_not_narrow_what_it_sums() -> None:
    row = "x: full | full | full fp32, pending(shard, replica) | full fp32"

    def rank_main(comm: Comm) -> None:
        model = net().double()
        Engine(model, comm, strategy=row, optimizer=adam(model), loss_fn=loss_sum, count_fn=len)

    with pytest.raises(ValueError, match="fewer bits"):
        run(Mesh(), rank_main, deadline=20)


class Kinds(nn.Module):
    """A real weight, a complex one, and a frozen list of indices, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.kept = nn.Parameter(torch.tensor([0, 3, 2, 5]), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x_BC: Tensor) -> Tensor:
        return (self.first(x_BC)[:, self.kept].to(self.turn.dtype) @ self.turn).abs()


@pytest.mark.parametrize("row", ["ddp", "zero2", "zero3"])
def test_bytes_of_integers_and_complex_numbers_are_predicted_under_dtypes(row: str) -> None:
    torch.manual_seed(0)
    models = [Kinds() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    strategy = TABLE[row].mixed("bf16")

    def rank_main(comm: Comm) -> None:
        model = models[comm.rank]
        engine = Engine(
            model,
            comm,
            strategy=strategy,
            optimizer=adam(model),
            loss_fn=lambda m, x: m(x.to(BF16)).square().sum(),
            count_fn=len,
        )
        comm.ledger.clear()
        engine.step(batches(0, comm.rank, 1))
        sent = [e for e in comm.ledger.entries if e.note.phase != "setup"]
        assert not differences(predict_step(engine.placed.layouts(), comm.mesh, strategy, 1, comm.rank), sent)
        ahead, kept = held(engine.placed.layouts(), comm.mesh, strategy, comm.rank, 2), engine.placed.bytes_held()
        assert (kept["params"], kept["grads"], kept["optimizer"]) == (ahead.params, ahead.grads, ahead.optimizer)

    run(Mesh(shard=2), rank_main, deadline=20)
