"""A loss that is a mean: scaled by its count, whatever the counts of others are, or refused where nobody says so."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import adamw, batches, count, deal
from loop_cases import ALONE, LAYOUTS, layout
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


def terms(model: nn.Module, batch: cases.Batch) -> Tensor:
    """The losses of the samples that count."""
    out: Tensor = ((model(batch["x"]) - 0.5) ** 2).flatten(1).sum(1)[batch["mask"] == 1]
    return out


def mean(model: nn.Module, batch: cases.Batch) -> Tensor:
    return terms(model, batch).mean()


@pytest.mark.parametrize("none_here", [False, True])
@pytest.mark.parametrize("where", ALONE)
def test_means_of_ragged_microbatches_are_the_global_mean(where: str, none_here: bool) -> None:
    mesh, row = layout(where)
    template, data = cases.net(), batches(3)
    if none_here:  # the last rank's second microbatch has no term, so its mean is NaN
        for batch in data:
            batch["mask"][-1] = 0
            batch["mask"][-len(batch["mask"].tensor_split(2 * mesh.data_size)[-1]) :] = 0

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        losses = []
        for batch in data:
            for part in deal(batch, comm.mesh, comm.rank, 2):
                engine.backward(mean(model, part), count(part), reduction="mean")
            optimizer.step()
            losses.append(engine.last.loss)
        return losses, engine.full_state_dict()

    truth = cases.plain(template, data, loss=lambda model, batch: terms(model, batch).sum())
    for losses, state in run(mesh, body, deadline=20):
        assert losses == pytest.approx(truth.losses, rel=1e-12)
        assert all(cases.close(state[name], value) for name, value in truth.state.items())


MEANS = {
    "mean": lambda out: out.square().mean(),
    "mse": lambda out: F.mse_loss(out, torch.zeros_like(out)),
    "cross entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)),
    "bce": lambda out: F.binary_cross_entropy_with_logits(out, torch.zeros_like(out)),
}
SUMS = {
    "sum": lambda out: out.square().sum(),
    "cross entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long), reduction="sum"),
    "made a sum": lambda out: out.square().mean() * out.numel(),
    "zero": lambda out: out.sum() * 0.0,
}


def once(loss: Any, num: int, **options: Any) -> float:
    def body(comm: Comm) -> float:
        model = cases.net()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="zero1", optimizer=optimizer)
        engine.backward(loss(model(torch.ones(4, 5, dtype=torch.float64))), num, **options)
        optimizer.step()
        return engine.last.loss

    return run(Mesh(shard=2), body, deadline=20)[0]


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_that_is_passed_as_a_sum_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r'is a mean \(\w+\), and is taken as a sum of 4 terms.*reduction="mean"'):
        once(MEANS[kind], 4)


@pytest.mark.parametrize("kind", MEANS)
def test_whoever_says_so_may_pass_a_mean_as_a_sum(kind: str) -> None:
    """Each microbatch weighs the same: its mean is one term. Or it is said to be a sum."""
    assert once(MEANS[kind], 1) == pytest.approx(4 * once(MEANS[kind], 4, reduction="sum"))
    assert once(MEANS[kind], 1) == pytest.approx(once(MEANS[kind], 4, reduction="mean"))


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_is_a_sum(kind: str) -> None:
    assert once(SUMS[kind], 4) == once(SUMS[kind], 4, reduction="sum")


def test_another_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction='none'"):
        once(SUMS["sum"], 4, reduction="none")


def test_sum_of_mean_takes_functions_and_says_so_of_a_loss() -> None:
    with pytest.raises(TypeError, match=r'two functions.*reduction="mean"'):
        plait.sum_of_mean(torch.ones(()), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", LAYOUTS)
def test_a_loss_fn_that_returns_a_mean_is_refused_or_made_a_sum(where: str) -> None:
    mesh, row = layout(where)
    template = cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))
    data = [b | {"mask": torch.ones_like(b["mask"])} for b in batches(2)]

    def body(comm: Comm, loss_fn: Any) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=loss_fn, count_fn=count)
        return [engine.step(deal(batch, comm.mesh, comm.rank, 2)).loss for batch in data]

    with pytest.raises(ValueError, match=r"the loss is a mean \(MeanBackward0\).*plait\.sum_of_mean"):
        run(mesh, lambda comm: body(comm, mean), deadline=20)
    truth = cases.plain(template, data).losses
    for losses in run(mesh, lambda comm: body(comm, plait.sum_of_mean(mean, count)), deadline=20):
        assert losses == pytest.approx(truth, rel=1e-12)


LABELS = torch.tensor([[[0, 1, -100, 2], [1, 0, 2, 2]], [[1, -100, -100, 0], [2, 1, 0, 1]]])
"""By microbatch, then by rank."""
WEIGHT = torch.tensor([0.1, 2.0, 0.5])


def counted(
    count_of: Any, labels: Tensor = LABELS, later: Any = None, *, packed: bool = False, dtype: Any = None, **how: Any
) -> Any:
    """Two steps of some microbatches, dealt to as many ranks as there are labels for; ``later``: of the second step."""
    template = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))

    def loss_of(model: nn.Module, y: Tensor) -> Tensor:
        return F.cross_entropy(model(torch.ones(len(y), 4, dtype=dtype)), y, **how)

    def body(comm: Comm) -> None:
        model = copy.deepcopy(template).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer)
        for step in range(2):
            for y in (later if step and later is not None else labels)[:, comm.rank]:
                loss = checkpoint(loss_of, model, y, use_reentrant=False) if packed else loss_of(model, y)
                engine.backward(loss, count_of(y), "mean")
            optimizer.step()

    return run(Mesh(shard=labels.shape[1]), body, deadline=20)


def kept(labels: Tensor) -> int:
    return int((labels != -100).sum())


def test_the_weight_behind_a_mean_is_its_count() -> None:
    counted(kept)
    with pytest.raises(ValueError, match=r"of 4 targets are ignored.*Count the targets that the loss counts"):
        counted(len)
    with pytest.raises(ValueError, match=r'classes have weights.*take reduction="sum"'):
        counted(len, weight=WEIGHT)


def test_weights_behind_means_are_compared_over_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"0\.75 for each term of its count on rank 0 and 1 on rank 1"):
        counted(len, LABELS[:1])


def test_means_that_no_step_adds_up_are_as_in_plain_pytorch() -> None:
    """One microbatch of one rank in each step; a count of 1, which averages means; the same share of each ignored."""
    counted(len, LABELS[:1, :1], weight=WEIGHT)
    counted(len, LABELS[:1, :1], LABELS[1:, :1])
    counted(lambda labels: 1)
    counted(len, torch.cat((LABELS[:1, :1], LABELS[:1, :1].roll(1, -1))))


def test_long_batches_in_16_bits_are_counted_exactly() -> None:
    labels = torch.zeros(2, 1, 515, dtype=torch.int64)
    labels[0, 0, :1] = labels[1, 0, :3] = -100
    counted(kept, labels, dtype=torch.bfloat16)


def test_a_loss_inside_of_a_checkpoint_is_left_alone() -> None:
    """What it has saved would be made anew for each look."""
    counted(len, packed=True)
