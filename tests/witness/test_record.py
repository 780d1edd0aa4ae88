"""A witness only watches: the run has the same bits, the record is bounded, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loops import RATE, Net, batch, loss_sum, terms, the_job
from torch import Tensor, nn

import plait
from plait.referee.witness.judge import judge
from plait.referee.witness.stored import read_witnessed


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        whole = batch(step)
        (loss_sum(model, whole) / terms(whole)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            loss_sum(model, batch(step + 7))  # an evaluation
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def fresh() -> Net:
    torch.manual_seed(3)
    return Net()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def loop() -> tuple[Net, torch.optim.Optimizer]:
    model = fresh()
    return model, sgd(list(model.parameters()))


def layered() -> tuple[Net, list[torch.optim.Optimizer]]:
    """An optimizer for each layer."""
    model = fresh()
    return model, [sgd(list(layer.parameters())) for layer in (model.up, model.down)]


def test_the_run_is_the_same_to_the_bit_and_no_hook_is_left(tmp_path: Path) -> None:
    (plain, own), (seen, optimizer) = loop(), loop()
    train(plain, [own], 3)
    with plait.witness(seen, optimizer, tmp_path / "w"):
        train(seen, [optimizer], 3)
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not seen._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    files = sorted(path.name for path in (tmp_path / "w/rank-00000").iterdir())
    train(seen, [optimizer], 1)
    assert files == sorted(path.name for path in (tmp_path / "w/rank-00000").iterdir())


def test_so_many_steps_are_written_and_no_more(tmp_path: Path) -> None:
    model, optimizer = loop()
    with plait.witness(model, optimizer, tmp_path / "w", steps=2) as seen:
        train(model, [optimizer], 5)
    assert seen.step == 2 and read_witnessed(tmp_path / "w").steps == 2
    found = judge(the_job(), tmp_path / "w")
    assert found.equal and found.text.startswith("2 steps of 1 rank:"), found


def test_a_model_in_a_wrapper_and_an_optimizer_for_each_layer(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.module(x)
            return y

    model, optimizers = layered()
    wrapped = Wrapper(model)
    with plait.witness(wrapped, optimizers, tmp_path / "w"):
        train(wrapped, optimizers, 2)
    assert judge(the_job(), tmp_path / "w").equal


def test_mistakes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = loop()
    with pytest.raises(ValueError, match="4 of the optimizer's tensors are not parameters of the model"):
        plait.witness(fresh(), optimizer, tmp_path / "w")
    with pytest.raises(ValueError, match="rank 2 of 2: ranks go from 0 to 1"):
        plait.witness(model, optimizer, tmp_path / "w", rank=2, ranks=2)
    with pytest.raises(ValueError, match="steps is 0: give a whole number from 1"):
        plait.witness(model, optimizer, tmp_path / "w", steps=0)
    with pytest.raises(ValueError, match=r"pieces has .* for 'up.bias', which has the shape \(7,\) on this rank"):
        plait.witness(model, optimizer, tmp_path / "w", pieces={"up.bias": ((0, 3),)})
    with plait.witness(model, optimizer, tmp_path / "w"):
        pass
    again = plait.witness(model, optimizer, tmp_path / "w")
    with pytest.raises(ValueError, match="is not empty: give a new folder"), again:
        pass


def test_one_of_two_optimizers_steps_twice(tmp_path: Path) -> None:
    model, optimizers = layered()
    with plait.witness(model, optimizers, tmp_path / "w"):
        train(model, [optimizers[0], *optimizers], 1)
    found = judge(the_job(), tmp_path / "w")
    assert (found.step, found.phase) == (0, "update") and "applied twice" in found.cause, found
