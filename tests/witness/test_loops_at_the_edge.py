"""Steps that are made in an unusual way: judged right, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net, batch, loss_sum, terms
from torch import Tensor, nn

import plait


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return loss_sum(model, batch(step)) / terms(batch(step))


def judged(folder: Path, make: Any, way: str, build: Any = Net, loss: Any = loss_sum) -> Any:
    """A loop of three steps under the witness, and what is said of it."""
    torch.manual_seed(0)
    model = build()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
    if way == "stepped before":
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with plait.witness(model, optimizer, folder, steps=3):
        for step in range(3):
            optimizer.zero_grad()

            def closure(step: int = step) -> Any:
                value = loss(model, batch(step)) / terms(batch(step))
                scaler.scale(value).backward()
                return value

            if way == "closure":
                optimizer.step(closure)
                continue
            closure()
            if way == "thrown away":
                optimizer.zero_grad()
            if way == "one gradient wrong":
                for parameter in model.small.parameters():  # type: ignore[union-attr]
                    parameter.grad.neg_()
            scaler.step(optimizer)
            scaler.update()
    return plait.judge(plait.UserJob(build, loss, batch, terms, make), folder)


def test_a_fused_optimizer_that_unscales_inside_its_step(tmp_path: Path) -> None:
    assert judged(tmp_path / "w", fused, "scaled").equal


def test_gradients_that_are_thrown_away_before_the_step(tmp_path: Path) -> None:
    found = judged(tmp_path / "w", adamw, "thrown away")
    assert (found.step, found.phase, found.factor) == (0, "gradient", 0)
    assert "it is thrown away before the optimizer's step" in found.text


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("closure", r"optimizer.step\(closure\) makes its gradients inside of the step"),
        ("stepped before", "has made steps already, and the judge begins with a new one"),
    ],
)
def test_what_cannot_be_witnessed_is_refused(way: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        judged(tmp_path / "w", adamw, way)


class Towers(nn.Module):
    """Two models in one, of which one has gradients ten million times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.large(x) * 1e4, self.small(x) * 1e-3], dim=1)


def both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    wanted = torch.cat([batch["y"] * 1e4, batch["y"]], dim=1)
    return ((model(batch["x"]) - wanted).square() * batch["mask"].repeat(1, 2)).sum()


def test_gradients_that_are_too_small_to_be_judged_are_named(tmp_path: Path) -> None:
    found = judged(tmp_path / "w", adamw, "one gradient wrong", Towers, both)
    assert found.equal and "not judged: 4 gradients far below the largest one (small.up.weight, " in found.text
