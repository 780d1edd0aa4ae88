"""Roundings that a loop declares are accepted as rounding; other faults and common factors are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_cases import WIDTH, Batch, backward, judged, squares
from test_causes import Residual, many
from torch import Tensor, nn

from plait.referee.witness.declared import _Products, rounded
from plait.run.commands.main import main


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, WIDTH))


def autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch[0])
    loss: Tensor = (out.float() - batch[1]).square().sum()
    return loss


def whole(model: nn.Module, step: int) -> None:
    backward(model, many(step))


def under_autocast(model: nn.Module, step: int) -> None:
    backward(model, many(step), autocast)


def in_tf32(model: nn.Module, step: int) -> None:
    with _Products("tf32"):
        backward(model, many(step))


def in_parts(model: nn.Module, step: int) -> None:
    """As DDP's bf16 hook: the parts of four ranks are rounded, and added up in bf16."""
    x, y = many(step)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for part, target in zip(x.split(16), y.split(16), strict=True):
        model.zero_grad()
        (squares(model, (part, target)) / y.numel()).backward()
        total = [rounded(t + rounded(p.grad, "bf16"), "bf16") for t, p in zip(total, model.parameters(), strict=True)]
    for p, t in zip(model.parameters(), total, strict=True):
        p.grad = t


LOOPS = {"autocast": (under_autocast, "bf16"), "bf16 sums": (in_parts, "bf16"), "tf32": (in_tf32, "tf32")}


def body(
    gradient: Callable[[nn.Module, int], None], harm: Callable[[Any], Any], model: Any, own: Any, step: int
) -> None:
    gradient(model, step)
    harm(model)
    own.step()
    own.zero_grad()


def times(factor: float) -> Callable[[Any], None]:
    def change(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad.mul_(factor)  # type: ignore[union-attr]

    return change


@pytest.mark.parametrize("loop", LOOPS)
def test_a_declared_rounding_is_no_fault(tmp_path: Path, loop: str) -> None:
    gradient, rounding = LOOPS[loop]
    right = partial(body, gradient, lambda model: None)
    found = judged(tmp_path / "declared", right, build=net, batches=many, rounding=rounding)
    assert found.equal and f"since rounding to {rounding} is declared" in found.text, found
    assert not judged(tmp_path / "undeclared", right, build=net, batches=many).equal


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("harm", "name", "said"),
    [
        (times(1.01), "", "every gradient is 1.01"),
        (times(0.99), "", "every gradient is 0.99"),
        (times(2.0), "", "every gradient is 2"),
        (lambda model: model[2].weight.grad[3].zero_(), "2.weight", "only index 3 of 32 of dim 0: "),
        (lambda model: model[2].bias.grad.neg_(), "2.bias", "-"),
    ],
)
def test_what_no_rounding_makes_is_named_beside_it(
    tmp_path: Path, loop: str, harm: Callable[[Any], Any], name: str, said: str
) -> None:
    gradient, rounding = LOOPS[loop]
    found = judged(tmp_path, partial(body, gradient, harm), build=net, batches=many, rounding=rounding)
    assert (found.step, found.phase, found.name) == (0, "gradient", name), found
    assert said in found.text or found.factor == pytest.approx(float(said[-4:]), abs=2e-3), found


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_factor_of_one_percent_under_a_jobs_own_autocast_is_named(tmp_path: Path, factor: float) -> None:
    found = judged(tmp_path, sizes=15, change=times(factor), build=Residual, batches=many)
    assert (found.step, found.phase, found.factor) == (0, "gradient", pytest.approx(factor, abs=1e-3)), found


def test_a_rounding_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounding is 'int8': give tf32, bf16, fp16, or None"):
        judged(tmp_path / "int8", rounding="int8")


def test_equal_where_judged_is_another_word_and_a_floor_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.py").write_text(
        "import plait, torch\nfrom test_rounding import *\n"
        "job = plait.UserJob(net, squares, many, lambda b: b[1].numel(), lambda p: torch.optim.AdamW(p, lr=1e-2))\n"
    )
    right = partial(body, under_autocast, lambda model: None)
    found = judged(tmp_path, right, build=net, batches=many, rounding="bf16")
    assert found.word == "equal where judged" and 0.01 < found.judged_to < 0.3, found
    words = ["judge", str(tmp_path / "w"), "--job", f"{tmp_path / 'jobs.py'}:job", "--rounding", "bf16"]
    for floor, code in ((None, 0), ("0.5", 0), ("0.005", 1)):
        assert main([*words, *(["--floor", floor] if floor else [])]) == code, capsys.readouterr()
        assert capsys.readouterr().out.startswith("equal where judged: 3 steps of 1 rank")
