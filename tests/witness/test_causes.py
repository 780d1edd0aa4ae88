"""Reported causes are the real ones, and the judge says what noise hides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Made
from judged_cases import WIDTH, backward, batch, judged, squares
from torch import nn

import plait
from plait.referee.witness.run import _driven


def test_a_gradient_is_told_where_forwards_are_not_seen(tmp_path: Path) -> None:
    """As under a pipeline's stages, the model itself is never called; the gradients of step 1 count twice."""

    def through_forward(model: nn.Module, step: int) -> None:
        x, y = batch(step)
        ((model.forward(x) - y).square().sum() * (2 if step == 1 else 1) / y.numel()).backward()

    judgement = judged(tmp_path, gradient=through_forward, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert (judgement.step, judgement.phase, judgement.factor) == (1, "gradient", pytest.approx(2, rel=1e-4))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))


def test_forwards_of_one_count_are_no_means_of_different_counts(tmp_path: Path) -> None:
    judgement = judged(tmp_path, build=normalised, sizes=6, scale=2.0)
    assert judgement.phase == "gradient" and "different counts" not in judgement.text


def in_16_bits(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda model, x: torch.autocast("cpu", torch.bfloat16)(run)(model, x).float()


def scaled() -> nn.Module:
    """A branch that begins with a factor of 1e-4 (LayerScale), in 16 bits."""
    run = in_16_bits(lambda m, x: m.out(x + 1e-4 * m.up(x).tanh()))
    return Made(run, up=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, WIDTH))


def test_what_the_noise_of_16_bits_hides_is_said(tmp_path: Path) -> None:
    def no_branch(model: Any) -> None:
        model.up.weight.grad.zero_()

    def no_head(model: Any) -> None:
        model.out.weight.grad.mul_(1.5)

    for change in (lambda model: None, no_branch):
        judgement = judged(tmp_path / change.__name__, sizes=5, change=change, build=scaled)
        assert judgement.equal and "not judged: 2 gradients far below the largest one (up.weight" in judgement.text
    assert not judged(tmp_path / "head", sizes=5, change=no_head, build=scaled).equal


def test_a_dtype_that_is_none_is_refused(tmp_path: Path) -> None:
    judged(tmp_path)
    job = plait.UserJob(nn.Module, squares, batch, len, torch.optim.SGD)
    with pytest.raises(ValueError, match="dtype is 'float32': give fp32 or fp64"):
        plait.judge(job, tmp_path / "w", dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [None, (nn.Linear(2, 2), "sgd", len), (nn.Linear(2, 2), None)])
def test_an_adapter_that_returns_something_else_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match=r"--engine mine\.py:engine returned .*: return the model, its optimizer and"):
        _driven("mine.py:engine", made)


def residual() -> nn.Module:
    """A stack of residual MLPs behind norms, in 16 bits: much of its gradients is rounding."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        for block in m.blocks:
            h = h + block(h)
        return m.last(h)

    block = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))  # noqa: E731
    ends = {"first": nn.Linear(WIDTH, 64), "last": nn.Linear(64, WIDTH)}
    return Made(in_16_bits(run), **ends, blocks=nn.ModuleList(block() for _ in range(4)))


def many(step: int) -> Any:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def test_a_right_loop_in_16_bits_is_right(tmp_path: Path) -> None:
    assert judged(tmp_path, sizes=15, build=residual, batches=many).equal


def spread_too(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that compares samples a little: parts of a batch do not add up to it, and that is no rounding."""
    out = model(batch[0])
    loss: torch.Tensor = (out - batch[1]).square().sum() - 0.15 * len(out) * out.mean(0).square().sum()
    return loss


def test_a_loss_that_compares_samples_excuses_no_more_in_fp32(tmp_path: Path) -> None:
    """Its parts are off by 1 to 2 %, and a gradient that is 4 % too large is a fault."""

    assert judged(tmp_path, loss=spread_too, batches=many).equal
    judgement = judged(tmp_path / "wrong", change=lambda m: m[0].weight.grad.mul_(1.04), loss=spread_too, batches=many)
    assert (judgement.phase, judgement.name) == ("gradient", "0.weight"), judgement.text


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def clipped(
    before: Callable[[nn.Module], Any] = lambda model: None,
    after: Callable[[nn.Module], Any] = lambda model: None,
    norm: float = 1.0,
) -> Any:
    """Clips by ``norm`` times the norm of what ``before`` has made of the gradients."""

    def change(model: nn.Module) -> None:
        before(model)
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total * norm)
        after(model)

    return change


def scale(layer: int, factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for p in model[layer].parameters():
            p.grad.mul_(factor)

    return change


CLIPPED = [
    (3, clipped(scale(0, 2)), "0.bias", "2 times what it should be; the clip makes the 4 others 0."),
    (3, clipped(scale(2, 2)), "2.bias", "2 times what it should be; the clip makes the 4 others 0."),
    (3, clipped(scale(1, 0.5)), "1.bias", "1/2 times what it should be; the clip makes the 4 others 1."),
    (2, clipped(scale(0, 2)), "0.bias", "2 times what it should be; the clip makes the 2 others 0."),
    (2, clipped(scale(0, 2)), "0.bias", "unless it is these that are wrong"),
    (3, clipped(lambda model: model[0].weight.grad[3:5].zero_()), "0.weight", "only indices 3 to 4 of 8 of dim 0"),
    (3, clipped(after=scale(1, 2)), "1.bias", "2 times what it should be; 1 other parameter is wrong too"),
    (3, clipped(norm=3.0), "", "1/3 times what it should be: the norm that it is clipped by is 3 times"),
]


@pytest.mark.parametrize(("count", "change", "name", "said"), CLIPPED)
def test_a_fault_before_a_clip_is_told_from_what_the_clip_makes_of_the_others(
    tmp_path: Path, count: int, change: Any, name: str, said: str
) -> None:
    found = judged(tmp_path, change=change, build=lambda: layers(count), clip=0.05)
    assert (found.step, found.phase, found.name) == (0, "gradient", name) and said in found.text, found


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_gradient_of_the_step_before_is_not_called_a_forgotten_zero_grad(
    tmp_path: Path, clip: float | None
) -> None:
    last: list[torch.Tensor] = []

    def late(model: nn.Module) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        now = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p, old in zip(model.parameters(), last, strict=False):
            p.grad = old.clone()
        last[:] = now

    found = judged(tmp_path, change=late, clip=clip)
    assert (found.step, found.phase) == (1, "gradient"), found
    assert "is given the gradient of the step before, and this step's is lost" in found.cause, found


# ---- steps that are made in an unusual way --------------------------------------------------------------------------


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def test_a_fused_optimizer_that_unscales_inside_its_step(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def body(model: nn.Module, optimizer: Any, step: int) -> None:
        x, y = batch(step)
        scaler.scale(squares(model, (x, y)) / y.numel()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert judged(tmp_path, body, optimizer=fused).equal


def test_gradients_that_are_thrown_away_before_the_step(tmp_path: Path) -> None:
    found = judged(tmp_path, change=lambda model: model.zero_grad())
    assert (found.step, found.phase, found.factor) == (0, "gradient", 0)
    assert "it is thrown away before the optimizer's step" in found.text


def test_steps_that_cannot_be_witnessed_are_refused(tmp_path: Path) -> None:
    def closes(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.step(lambda: backward(model, batch(step)))

    with pytest.raises(ValueError, match=r"optimizer.step\(closure\) makes its gradients inside the step"):
        judged(tmp_path / "closure", closes)

    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        backward(model, batch(0))
        optimizer.step()
        return optimizer

    with pytest.raises(ValueError, match="has made steps already, and the judge begins with a new one"):
        judged(tmp_path / "before", optimizers=stepped)


def towers() -> nn.Module:
    """Two models in one, of which one has gradients ten million times as large."""
    run = lambda m, x: torch.cat([m.large(x) * 1e4, m.small(x) * 1e-3], dim=1)  # noqa: E731
    return Made(run, large=layers(2), small=layers(2))


def test_gradients_that_are_too_small_to_be_judged_are_named(tmp_path: Path) -> None:
    def wrong(model: Any) -> None:
        for parameter in model.small.parameters():
            parameter.grad.neg_()

    def batches(step: int) -> Any:
        x, y = batch(step)
        return x, torch.cat([y * 1e4, y], dim=1)

    found = judged(tmp_path, change=wrong, build=towers, batches=batches)
    assert found.equal and "not judged: 4 gradients far below the largest one (small.0.weight, " in found.text
