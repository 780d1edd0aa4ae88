"""Complex numbers, frozen numbers of eight bits and numbers that are not finite are judged like all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_cases import backward, batch, judged
from torch import Tensor, nn

from plait.referee.witness.judgement import Judgement

FP8 = [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith(("float8_e4", "float8_e5"))]
COMPLEX = {torch.complex64: "fp32", torch.complex128: "fp64"}


def numbers(step: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(12, width, generator=generator, dtype=dtype) for width in (3, 2))


def squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).abs().square().sum()
    return loss


def judge_complex(
    path: Path, dtype: torch.dtype, harm: Callable[[Tensor], Any] | None = None, **settings: Any
) -> Judgement:
    settings |= {"build": partial(nn.Linear, 3, 2, dtype=dtype), "batches": partial(numbers, dtype=dtype)}
    change = lambda model: harm and harm(model.weight.grad)  # noqa: E731
    return judged(path, change=change, loss=squares, dtype=COMPLEX[dtype], **settings)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_right_loop_of_complex_weights_is_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    found = judge_complex(tmp_path, dtype)
    assert found.equal and found.text.startswith("3 steps"), found


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda g: g.imag.zero_(), "only the imaginary part: zero"),
        (lambda g: g.mul_(1j), "off by up to"),
        (lambda g: g.imag[0, 0].fill_(torch.nan), "not finite in 1 of"),
    ],
)
def test_what_is_wrong_with_a_complex_gradient_is_named(
    tmp_path: Path, dtype: torch.dtype, harm: Callable[[Tensor], Any], said: str
) -> None:
    found = judge_complex(tmp_path, dtype, harm)
    assert (found.step, found.phase, found.name) == (0, "gradient", "weight"), found
    assert said in found.text, found


class Harmed(torch.optim.AdamW):
    """Harms the first parameter's update."""

    def __init__(self, parameters: Any, harm: Callable[[Tensor], Any]) -> None:
        super().__init__(parameters, lr=1e-2)
        self.harm = harm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        weight = self.param_groups[0]["params"][0]
        before = weight.clone()
        super().step()
        weight.copy_(self.harm(weight - before) + before)


@pytest.mark.parametrize("harm", [lambda d: d.real + 0j, lambda d: d.conj(), lambda d: d * 2])
def test_what_is_wrong_with_the_update_of_a_complex_weight_is_named(tmp_path: Path, harm: Any) -> None:
    made = judge_complex(tmp_path, torch.complex64, optimizers=lambda model: Harmed(model.parameters(), harm))
    assert (made.step, made.phase, made.name) == (0, "update", "weight"), made


class Odd(nn.Module):
    """A linear layer beside frozen numbers of another dtype, and a table of which no row is read that is NaN."""

    def __init__(self, dtype: torch.dtype = torch.float32, lost: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.ones(3, 8))
        frozen = torch.ones(2, 8).to(dtype)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        if lost:
            self.table.data[2, 1], self.table.data[2, 2] = torch.nan, -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.table[0]) * self.frozen[0].to(torch.float32)
        return out


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loop_that_starts_with_a_nan_is_judged(tmp_path: Path, optimizer: Any) -> None:
    settings = {"build": partial(Odd, lost=True), "optimizer": partial(optimizer, lr=1e-2)}
    found = judged(tmp_path / "right", **settings)
    assert found.equal and found.text.startswith("3 steps"), found

    wrong = judged(tmp_path / "wrong", change=lambda model: model.table.grad.mul_(3), **settings)
    assert (wrong.step, wrong.phase, wrong.name) == (0, "gradient", "table"), wrong


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_frozen_numbers_of_eight_bits_are_judged(tmp_path: Path, dtype: torch.dtype) -> None:
    found = judged(tmp_path / "right", build=partial(Odd, dtype))
    assert found.equal, found

    def body(model: nn.Module, own: torch.optim.Optimizer, step: int) -> None:
        backward(model, batch(step))
        own.step()
        own.zero_grad()
        model.frozen.data = (model.frozen.data.float() * 2).to(dtype)  # type: ignore[operator, union-attr]

    wrong = judged(tmp_path / "wrong", body, build=partial(Odd, dtype))
    assert (wrong.step, wrong.phase, wrong.name) == (0, "between", "frozen"), wrong
