"""A loop of one's own that is stopped within an epoch and goes on under another mesh: each sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.comm import Comm

SAMPLES, BATCH = 23, 4


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 7), nn.Dropout(dropout), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def trained(
    comm: Comm, folder: Path, stop: int | None, *, workers: int = 0, dropout: float = 0.2
) -> tuple[list[Any], list[float], Any]:
    """From the newest checkpoint on, up to a step of the run: the samples that this rank saw, each with its step; the
    losses; what the model has in the end."""
    with plait.empty_parameters():
        model = Net(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
    data = TensorDataset(torch.arange(SAMPLES * 3.0).view(SAMPLES, 3) / 10, torch.arange(float(SAMPLES))[:, None])
    batches = plait.rank_batches(data, BATCH, comm, shuffle=True, seed=2)
    first, begun = 0, 0
    if folder.exists():
        extra = plait.load(folder, engine).extra
        first, begun = extra["epoch"], extra["batches"]
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": "forkserver", "prefetch_factor": 2}
    seen, losses = [], []
    for epoch in range(first, 2):
        batches.set_epoch(epoch, start=begun if epoch == first else 0)
        loader = DataLoader(data, batch_sampler=batches, **options)
        for number, (x, y) in enumerate(loader, start=batches.start + 1):
            engine.backward((model(x) - y).square().sum(), len(y))
            optimizer.step()
            seen += [(engine.steps, int(one)) for one in y]
            losses.append(engine.last.loss)
            if engine.steps == stop:
                plait.save(folder, engine, extra={"epoch": epoch, "batches": number})
                return seen, losses, None
    return seen, losses, engine.full_state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_three_stops_in_an_epoch_each_under_another_mesh(workers: int, tmp_path: Path) -> None:
    options: Any = {"workers": workers, "dropout": 0.0}  # whose masks depend on the mesh where ranks have unequal parts

    def played(mesh: str, folder: str, stop: int | None) -> tuple[list[Any], list[float], Any]:
        ranks = plait.run_threads(mesh, lambda comm: trained(comm, tmp_path / folder, stop, **options))
        return [one for seen, *_ in ranks for one in seen], ranks[0][1], ranks[0][2]

    whole_seen, whole_losses, whole = played("shard=2", "none", None)
    assert sorted(sample for _, sample in whole_seen) == sorted([*range(SAMPLES)] * 2) and len(whole_losses) == 12
    seen, losses, end = [], [], None
    for mesh, stop in (("shard=2", 2), ("shard=3", 4), ("replica=2", 7), ("shard=1", None)):
        own, more, end = played(mesh, "run", stop)
        seen, losses = seen + own, losses + more
    assert sorted(seen) == sorted(whole_seen) and losses == pytest.approx(whole_losses, rel=1e-4)
    assert all(torch.allclose(end[name], value, atol=1e-4) for name, value in whole.items())
