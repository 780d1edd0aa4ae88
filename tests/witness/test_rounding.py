"""Honest roundings and every dtype are judged right; what is no rounding is named."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Made
from judged_cases import WIDTH, Batch, backward, batch, judged, squares
from test_causes import many, residual
from torch import Tensor, nn

from plait.referee.witness.declared import _Products, rounded
from plait.referee.witness.judgement import Judgement
from plait.run.commands.main import main


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, WIDTH))


def autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch[0])
    loss: Tensor = (out.float() - batch[1]).square().sum()
    return loss


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


def times(factor: float) -> Callable[[Any], None]:
    def change(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad.mul_(factor)  # type: ignore[union-attr]

    return change


@pytest.mark.parametrize("loop", LOOPS)
def test_a_declared_rounding_is_no_fault(tmp_path: Path, loop: str) -> None:
    gradient, rounding = LOOPS[loop]
    found = judged(tmp_path / "declared", gradient=gradient, build=net, batches=many, rounding=rounding)
    assert found.equal and f"since rounding to {rounding} is declared" in found.text, found
    assert not judged(tmp_path / "undeclared", gradient=gradient, build=net, batches=many).equal


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
    found = judged(tmp_path, gradient=gradient, change=harm, build=net, batches=many, rounding=rounding)
    assert (found.step, found.phase, found.name) == (0, "gradient", name), found
    assert said in found.text or found.factor == pytest.approx(float(said[-4:]), abs=2e-3), found


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_factor_of_one_percent_under_a_jobs_own_autocast_is_named(tmp_path: Path, factor: float) -> None:
    found = judged(tmp_path, sizes=15, change=times(factor), build=residual, batches=many)
    assert (found.step, found.phase, found.factor) == (0, "gradient", pytest.approx(factor, abs=1e-3)), found


def test_a_rounding_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounding is 'int8': give tf32, bf16, fp16, or None"):
        judged(tmp_path / "int8", rounding="int8")


def test_equal_where_judged_is_another_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.py").write_text(
        "import plait, torch\nfrom test_rounding import *\n"
        "job = plait.UserJob(net, squares, many, lambda b: b[1].numel(), lambda p: torch.optim.AdamW(p, lr=1e-2))\n"
    )
    found = judged(tmp_path, gradient=under_autocast, build=net, batches=many, rounding="bf16")
    assert found.word == "equal where judged" and 0.01 < found.judged_to < 0.3, found
    words = ["judge", str(tmp_path / "w"), "--job", f"{tmp_path / 'jobs.py'}:job", "--rounding", "bf16"]
    assert main(words) == 0, capsys.readouterr()
    assert capsys.readouterr().out.startswith("equal where judged: 3 steps of 1 rank")


FP8 = [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith(("float8_e4", "float8_e5"))]
COMPLEX = {torch.complex64: "fp32", torch.complex128: "fp64"}


def numbers(step: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(12, width, generator=generator, dtype=dtype) for width in (3, 2))


def complex_squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).abs().square().sum()
    return loss


def judge_complex(
    path: Path, dtype: torch.dtype, harm: Callable[[Tensor], Any] | None = None, **settings: Any
) -> Judgement:
    settings |= {"build": partial(nn.Linear, 3, 2, dtype=dtype), "batches": partial(numbers, dtype=dtype)}
    change = lambda model: harm and harm(model.weight.grad)  # noqa: E731
    return judged(path, change=change, loss=complex_squares, dtype=COMPLEX[dtype], **settings)


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


def odd(dtype: torch.dtype = torch.float32, lost: bool = False) -> nn.Module:
    """A linear layer beside frozen numbers of another dtype, and a table of which no row is read that is NaN."""
    run = lambda m, x: m.linear(x * m.table[0]) * m.frozen[0].to(torch.float32)  # noqa: E731
    frozen = nn.Parameter(torch.ones(2, 8).to(dtype), requires_grad=False)
    model = Made(run, linear=nn.Linear(8, 8), table=nn.Parameter(torch.ones(3, 8)), frozen=frozen)
    if lost:
        model.table.data[2, 1], model.table.data[2, 2] = torch.nan, -torch.inf
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loop_that_starts_with_a_nan_is_judged(tmp_path: Path, optimizer: Any) -> None:
    settings = {"build": partial(odd, lost=True), "optimizer": partial(optimizer, lr=1e-2)}
    found = judged(tmp_path / "right", **settings)
    assert found.equal and found.text.startswith("3 steps"), found

    wrong = judged(tmp_path / "wrong", change=lambda model: model.table.grad.mul_(3), **settings)
    assert (wrong.step, wrong.phase, wrong.name) == (0, "gradient", "table"), wrong


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_frozen_numbers_of_eight_bits_are_judged(tmp_path: Path, dtype: torch.dtype) -> None:
    found = judged(tmp_path / "right", build=partial(odd, dtype))
    assert found.equal, found

    def body(model: nn.Module, own: torch.optim.Optimizer, step: int) -> None:
        backward(model, batch(step))
        own.step()
        own.zero_grad()
        model.frozen.data = (model.frozen.data.float() * 2).to(dtype)  # type: ignore[operator, union-attr]

    wrong = judged(tmp_path / "wrong", body, build=partial(odd, dtype))
    assert (wrong.step, wrong.phase, wrong.name) == (0, "between", "frozen"), wrong
