"""Unusual right loops are called right, their extra work hides no fault; loops that cannot be judged are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Made
from judged_cases import WIDTH, Batch, adamw, backward, batch, judged, squares
from torch import Tensor, nn

import plait

# ---- right loops that do it in another way --------------------------------------------------------------------------


class Centred(nn.Module):
    """Changes a buffer in each training forward, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x - self.mean)
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return y


def normalised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 16)), nn.Linear(16, WIDTH))


def wild() -> nn.Module:
    """Sines of sines, in which rounding grows from step to step."""
    sine = lambda m, x: torch.sin(2 * m.layer(x))  # noqa: E731
    return nn.Sequential(*(Made(sine, layer=nn.Linear(WIDTH, WIDTH)) for _ in range(6)))


def in_halves(model: nn.Module, optimizer: Any, step: int) -> None:
    if not step:  # weights that are loaded after the start are those of the job
        model.load_state_dict(wild().state_dict())
    x, y = batch(step)
    for part, target in zip(x.split(5), y.split(5), strict=True):
        (squares(model, (part, target)) / y.numel()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_makes_much_of_rounding_is_judged_step_by_step(tmp_path: Path) -> None:
    fast = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731
    found = judged(tmp_path, in_halves, build=wild, steps=16, witnessed=16, optimizer=fast)
    assert found.equal and found.text.startswith("16 steps of 1 rank"), found


@pytest.mark.parametrize("build", [Centred, normalised])
def test_buffers_that_a_forward_changes_go_on_with_the_steps(build: Any, tmp_path: Path) -> None:
    assert judged(tmp_path, build=build).equal, "the loop draws other buffers than the job"


class Calls(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step()


def by_forward(model: nn.Module, optimizer: Any, step: int) -> None:
    x, y = batch(step)
    ((model.forward(x) - y).square().sum() / y.numel()).backward()
    optimizer.step()
    optimizer.zero_grad()


def looks_twice(model: nn.Module, optimizer: Any, step: int) -> None:
    model(batch(step)[0])  # to learn shapes, or to evaluate, with an unused graph
    model(batch(99)[0])
    backward(model, batch(step))
    optimizer.step()
    optimizer.zero_grad()


def test_right_loops_are_right(tmp_path: Path) -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch puts its hooks around the parent's step too
    own: Callable[[nn.Module], Any] = lambda model: Calls(model.parameters(), lr=1e-2)  # noqa: E731
    assert judged(tmp_path / "super", optimizers=own).equal
    assert judged(tmp_path / "forward", by_forward).equal
    assert judged(tmp_path / "twice", looks_twice).equal


def test_extra_forwards_do_not_hide_what_is_wrong(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, step: int) -> None:
        x, y = batch(step)
        model(x[:6])  # as a pipeline learns the shapes of a microbatch
        for rows in (slice(0, 6), slice(6, 12)):
            (2 * squares(model, (x[rows], y[rows])) / y.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = judged(tmp_path, body)
    assert (found.phase, found.factor) == ("gradient", pytest.approx(2)), found


def test_of_two_stages_the_last_one_is_named_first(tmp_path: Path) -> None:
    """A wrong loss makes all of the model wrong, from its end."""
    layers = lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH))  # noqa: E731
    job = plait.UserJob(layers, squares, batch, lambda b: b[1].numel(), adamw)
    stages = [nn.Sequential(layer) for layer in job.model(0)]  # type: ignore[arg-type]
    optimizers = [adamw(stage.parameters()) for stage in stages]
    renamed = {f"0.{kind}": f"1.{kind}" for kind in ("weight", "bias")}
    with (
        plait.witness(stages[0], optimizers[0], tmp_path, rank=0, ranks=2),
        plait.witness(stages[1], optimizers[1], tmp_path, rank=1, ranks=2, names=renamed, inputs=False),
    ):
        x, y = batch(0)
        backward(nn.Sequential(*stages), (x, y.flip(0)))
        for optimizer in optimizers:
            optimizer.step()
    found = plait.judge(job, tmp_path)
    assert (found.phase, found.name, found.ranks) == ("gradient", "1.weight", (1,)), found


def test_sparse_gradients_are_kept_whole(tmp_path: Path) -> None:
    def words(step: int) -> Batch:
        return torch.arange(12) % (3 + step), batch(step)[1]

    table = lambda: nn.Embedding(10, WIDTH, sparse=True)  # noqa: E731
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    assert judged(tmp_path, build=table, batches=words, optimizer=sgd).equal


# ---- what cannot be judged ------------------------------------------------------------------------------------------


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    def drops(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = (F.dropout(model(batch[0]), 0.5) - batch[1]).square().sum()
        return loss

    with pytest.raises(ValueError, match=r"draws random numbers in its forward: the gradient of step 0 is another one"):
        judged(tmp_path / "drops", loss=drops)
    for clip in (float("nan"), -1.0, 0.0, "1.0"):
        with pytest.raises(ValueError, match=r"clip is .*: give the norm that the loop clips to, a number above 0"):
            judged(tmp_path / f"clip {clip}", clip=clip)
