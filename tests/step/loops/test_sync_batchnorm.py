"""``nn.SyncBatchNorm`` under a world of any kind is BatchNorm of the whole batch, forward, backward and buffers."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, deal, sgd
from loop_cases import LAYOUTS, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh

KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "mean of all": {"momentum": None},
    "no weights": {"affine": False},
    "no statistics": {"track_running_stats": False},
}


def template(kind: str = "usual", frozen: bool = False) -> nn.Module:
    made = [
        nn.Sequential(nn.Linear(cases.WIDTH, cases.WIDTH), nn.BatchNorm1d(cases.WIDTH, **KINDS[kind]), nn.Tanh())
        for _ in range(4)
    ]
    model = cases.distinct(nn.Sequential(*made))
    if frozen:
        made[1].requires_grad_(False)
    return model


def loss(model: nn.Module, batch: cases.Batch) -> Tensor:
    return (model(batch["x"]) - 0.5).square().sum()


def count(batch: cases.Batch) -> int:
    return batch["x"].numel()


def deal_unevenly(batch: cases.Batch, mesh: Mesh, rank: int) -> cases.Batch:
    """All ranks have different numbers of samples; the first has none, where there are several."""
    ranks, index = mesh.data_size, mesh.data_rank(rank)
    ends = [0] + [round(13 * (i / (ranks - 1)) ** 2) if ranks > 1 else 13 for i in range(ranks)]
    return {name: value[ends[index] : ends[index + 1]] for name, value in batch.items()}


def plain(model: nn.Module, data: list[cases.Batch]) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = copy.deepcopy(model), []
    optimizer = adamw(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        value = loss(model, batch) / count(batch)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", LAYOUTS)
def test_it_is_batch_norm_of_the_whole_batch(where: str, kind: str, uneven: bool) -> None:
    mesh, row = layout(where)
    model = template(kind)

    def body(comm: Comm) -> Any:
        mine = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
        engine = Engine(mine, comm, strategy=row, optimizer=adamw(mine.parameters()), loss_fn=loss, count_fn=count)
        losses = []
        for batch in batches(3):
            part = deal_unevenly(batch, mesh, comm.rank) if uneven else deal(batch, mesh, comm.rank, 1)[0]
            losses.append(engine.step([part]).loss)
        if comm.mesh.pipe == 1:
            mine.eval()
            with torch.no_grad():
                outputs = mine(batches(1)[0]["x"])
        else:
            outputs = None
        return losses, engine.full_state_dict(), outputs, dict(mine.named_buffers())

    losses, state = plain(model, batches(3))
    ranks = run(mesh, body, deadline=20)
    for ours, mine, outputs, buffers in ranks:
        assert ours == pytest.approx(losses, rel=1e-10)
        assert all(cases.close(mine[name].double(), value.double(), 1e-10) for name, value in state.items())
        if outputs is not None:
            truth = copy.deepcopy(model)
            truth.load_state_dict(state)
            assert cases.close(outputs, truth.eval()(batches(1)[0]["x"]), 1e-10)
            assert all(torch.equal(buffers[name], value) for name, value in ranks[0][3].items()), (
                "one model on all ranks"
            )


def test_images_in_a_loop_of_ones_own_with_a_frozen_norm() -> None:
    """[samples, channels, height, width]; nothing asks for the gradient of a norm's weight."""

    def make() -> nn.Module:
        torch_model = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
        )
        model = cases.distinct(torch_model)
        model[1].requires_grad_(False)  # type: ignore[index]
        return model

    x = torch.randn(7, 2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(comm: Comm) -> Any:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(make())
        optimizer = sgd(model.parameters())
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer)
        for _ in range(3):
            out = model(x.tensor_split(3)[comm.rank])
            engine.backward((out - 1).square().sum(), out.numel(), "sum")
            optimizer.step()
        return engine.full_state_dict()

    model = make()
    optimizer = sgd(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    for state in run(Mesh(shard=3), body, deadline=20):
        assert all(cases.close(state[n].double(), v.double(), 1e-10) for n, v in model.state_dict().items())


def test_one_value_on_all_ranks_is_refused() -> None:
    def body(comm: Comm) -> None:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(template())
        Engine(model, comm, strategy="ddp")
        model(batches(1)[0]["x"][: 1 - comm.rank])

    with pytest.raises(ValueError, match="1 values per channel on all ranks together"):
        run(Mesh(shard=2), body, deadline=20)
