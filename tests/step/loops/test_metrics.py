"""A program's own metrics, over all data ranks; the same on every rank, under pipelines too."""

from __future__ import annotations

from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import batches, deal
from pipeline_cases import engine_on
from programs import STAGES, chain, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


@pytest.mark.parametrize("where", [*STAGES, "tensor"])
def test_sums_count_each_data_rank_once(where: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        for p in model.parameters():
            nn.init.ones_(p)
        model.tensor_plan = lambda: {}
        engine = Engine(model, comm, strategy=row)
        mine = 1 + comm.data_rank
        if comm.mesh.coordinates(comm.rank)["pipe"] + 1 < comm.mesh.pipe:
            return engine.sum(None), engine.sum(None), engine.sum("not looked at"), engine.gather(None)
        rows = torch.full((mine - 1, 2), mine, dtype=torch.int32)
        sums = engine.sum({"right": mine, "loss": mine / 8, "by class": torch.tensor([True, mine > 1])})
        return sums, engine.sum(mine), engine.sum(torch.tensor(0.5 * mine).bfloat16()), engine.gather(rows)

    n = mesh.data_size
    total = n * (n + 1) // 2
    for sums, number, tensor, rows in run(mesh, body, deadline=20):
        assert sums.keys() == {"right", "loss", "by class"} and sums["by class"].tolist() == [n, n - 1]
        assert (sums["right"], type(sums["right"])) == (total, int) == (number, type(number))
        assert (sums["loss"], type(sums["loss"])) == (total / 8, float)
        assert tensor.dtype == torch.float32 and tensor.item() == total / 2
        assert rows.dtype == torch.int32 and rows.shape[1] == 2
        assert rows[:, 0].tolist() == [mine for mine in range(1, n + 1) for _ in range(mine - 1)]


def test_a_gradient_that_some_ranks_need_only_is_refused() -> None:
    def body(comm: Comm) -> None:
        engine = Engine(chain(), comm, strategy="ddp")
        engine.gather(torch.ones(2, 3, requires_grad=comm.rank > 0))

    with pytest.raises(ValueError, match="one need of a gradient"):
        run(Mesh(shard=2), body, deadline=20)


@pytest.mark.parametrize("where", STAGES)
def test_a_metric_of_an_evaluation_is_the_plain_one(where: str) -> None:
    """Counted where the outputs are: in the loss function, which only the last stage carries to its end."""
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        seen = {"above": 0, "all": 0}
        outputs: list[Tensor] = []

        def counting(model: nn.Module, batch: cases.Batch) -> Tensor:
            out = model(batch["x"])
            seen["above"] += int((out > 0.3).sum())
            seen["all"] += out.numel()
            outputs.append(out.detach())
            return (out.sum(1) * batch["mask"]).sum()

        engine = engine_on(chain(), comm, strategy=row, loss_fn=counting)
        engine.evaluate(deal(batches(1)[0], comm.mesh, comm.rank, 2))
        return engine.sum(seen), engine.gather(torch.cat(outputs) if outputs else None)

    wanted = chain()(batches(1)[0]["x"]).detach()
    for sums, out in run(mesh, body, deadline=20):
        assert sums == {"above": int((wanted > 0.3).sum()), "all": wanted.numel()}
        assert cases.close(out, wanted)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda engine, rank: engine.sum({"a": 1, "b": 2} if rank else {"a": 1}), "sum different things"),
        (lambda engine, rank: engine.sum(1.0 if rank else 1), "sum different things"),
        (lambda engine, rank: engine.sum("loss"), "give numbers and tensors"),
        (lambda engine, rank: engine.gather(torch.ones(2, 2 + rank)), "after the first dim"),
        (lambda engine, rank: engine.gather(torch.ones(2) if rank else None), "after the first dim"),
        (lambda engine, rank: engine.gather(torch.ones(())), "a dim of samples"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(Mesh(shard=2), lambda comm: call(engine_on(chain(), comm), comm.rank), deadline=20)


def test_a_world_has_the_names_that_launchers_use() -> None:
    assert run(Mesh(replica=3), lambda comm: (comm.world_size, comm.local_rank)) == [(3, 0), (3, 1), (3, 2)]
