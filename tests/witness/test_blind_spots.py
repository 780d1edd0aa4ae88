"""Possible blind spots of a judge: missing steps, gradients that only one side has, numbers that are not finite."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Made
from judged_cases import WIDTH, Batch, adamw, backward, batch, judged, net, squares
from torch import Tensor, nn

import plait

# ---- steps that are not made ----------------------------------------------------------------------------------------


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [adamw([*model[0].parameters(), *model[2].parameters()]), adamw(model[1].parameters())]  # type: ignore[index]


@pytest.mark.parametrize(
    ("made", "steps", "says"),
    [
        ((), 3, "1.weight: it was not made, nor were those of 1 other: its optimizer, number 1, made none of 3 steps"),
        ((), 1, "not judged: 2 parameters in 1 step that optimizer number 1"),  # it may still have its turn
        ((0, 2), 3, "not judged: 2 parameters in 1 step that optimizer number 1 did not make (1)"),
        ((0, 1, 2), 3, "the run of a single process"),
    ],
)
def test_an_optimizer_that_makes_no_step_is_told(made: tuple[int, ...], steps: int, says: str, tmp_path: Path) -> None:
    def body(model: nn.Module, optimizers: Any, step: int) -> None:
        backward(model, batch(step))
        for optimizer in optimizers[: 1 + (step in made)]:
            optimizer.step()
        model.zero_grad()

    found = judged(tmp_path, body, optimizers=two_optimizers, steps=steps)
    assert says in found.text and found.equal == (bool(made) or steps == 1), found
    assert ("not judged" in found.text) == ("not judged" in says)


def test_updates_that_stop_are_left_out_and_other_forwards_are_told(tmp_path: Path) -> None:
    def stops(model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, batch(step))
        if step < 2:
            optimizer.step()
        optimizer.zero_grad()

    def evaluates(model: nn.Module, optimizer: Any, step: int) -> None:
        stops(model, optimizer, step if step < 2 else 77)  # other samples than those of step 2

    found = judged(tmp_path / "stops", stops, steps=4)
    assert (found.step, found.phase, found.cause) == (2, "update", "the optimizer's step was left out"), found
    found = judged(tmp_path / "evaluates", evaluates)
    assert found.equal and "not judged: 1 forward after the last update" in found.text
    assert judged(tmp_path / "all", steps=2).equal
    job = plait.UserJob(net, squares, batch, lambda b: b[1].numel(), adamw)
    found = plait.judge(job, tmp_path / "all" / "w", steps=5)
    assert "step 2, update: the one rank: the loop made 2 of 5 steps" in found.text
    assert judged(tmp_path / "full", witnessed=2, due=5).equal, "the witness was to write two"
    assert judged(tmp_path / "looks", stops, steps=3).equal, "it may be an evaluation of the next batch"


# ---- gradients that one side has ------------------------------------------------------------------------------------


def heads() -> nn.Module:
    """One of two heads is used in each step."""
    each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    return Made(lambda m, x, which: m.heads[int(which[0])](x), heads=each)


def of_heads(step: int) -> Batch:
    return (*batch(step), torch.full((12,), step % 2))


def loss_of_heads(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0], batch[2]) - batch[1]).square().sum()
    return loss


@pytest.mark.parametrize(
    ("idle", "says"),
    [
        ("left", "step 1, gradient of heads.0.bias: the one rank: the job gives it none, and the optimizer was given "),
        ("made up", "step 0, gradient of heads.1.bias: the one rank: the job gives it none"),
        ("zeros", "its gradient is zeros, and the job's is None"),
        ("none", "the run of a single process"),
    ],
)
def test_a_gradient_that_the_job_does_not_have_is_told(idle: str, says: str, tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any, step: int) -> None:
        backward(model, of_heads(step), loss_of_heads)
        other = model.heads[1 - step % 2]
        for parameter in other.parameters():
            if idle in ("made up", "zeros"):
                parameter.grad = torch.full_like(parameter, 0.0 if idle == "zeros" else 7.0)
        optimizer.step()
        if idle == "left":
            other.zero_grad()
        else:
            optimizer.zero_grad()

    found = judged(tmp_path, body, build=heads, loss=loss_of_heads, batches=of_heads)
    assert says in found.text and found.equal == (idle == "none"), found
    assert ("zero_grad leaves it out" in found.text) == (idle == "left")


def with_gate() -> nn.Module:
    """In odd steps the gradient of the gate is zero."""
    run = lambda m, x, on: m.linear(x) * (1 + m.gate * on[:, None])  # noqa: E731
    return Made(run, linear=nn.Linear(WIDTH, WIDTH), gate=nn.Parameter(torch.ones(WIDTH)))


def gated(step: int) -> Batch:
    return (*batch(step), torch.full((12,), 1.0 - step % 2))


@pytest.mark.parametrize("drops", [True, False])
def test_none_where_the_gradient_is_zero_is_another_update(drops: bool, tmp_path: Path) -> None:
    def drop(model: Any) -> None:
        if drops and not model.gate.grad.any():
            model.gate.grad = None

    found = judged(tmp_path, change=drop, build=with_gate, loss=loss_of_heads, batches=gated)
    assert found.equal == (not drops) and ("its gradient is None, and the job's is zeros" in found.text) == drops


# ---- numbers that hide, or are none ---------------------------------------------------------------------------------


def spoilt(step: int) -> Batch:
    x, y = batch(step)
    if step:
        x[0, 0] = torch.inf
    return x, y


@pytest.mark.parametrize("masks", [True, False])
def test_a_gradient_that_is_not_finite_ends_the_judgement_and_excuses_nothing(masks: bool, tmp_path: Path) -> None:
    def mask(model: nn.Module) -> None:
        for parameter in model.parameters():
            if masks and not parameter.grad.isfinite().all():  # type: ignore[union-attr]
                parameter.grad = torch.randn_like(parameter)

    found = judged(tmp_path, change=mask, batches=spoilt)
    assert found.equal == (not masks)
    says = "it is finite where the job's own gradient is not", "not judged from step 1 on, where the job's own"
    assert says[not masks] in found.text
    with pytest.raises(ValueError, match=r"in the first one the job's own gradient of .* is not finite"):
        judged(tmp_path / "first", batches=lambda step: spoilt(step + 1), steps=1)


@pytest.mark.parametrize("made", [1.0, 0.0])
def test_a_large_weight_does_not_hide_the_update_of_others(made: float, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            model.weight[0, 0] = 50.0
        return model

    def slow(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0)

    class Skips(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            before = [p.detach().clone() for p in self.param_groups[0]["params"]]
            super().step()
            with torch.no_grad():
                for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                    p.copy_(old + made * (p - old))

    def own(model: nn.Module) -> Any:
        return Skips(model.parameters(), lr=1e-5, weight_decay=0.0)

    found = judged(tmp_path, build=build, optimizer=slow, optimizers=own)
    assert found.equal == bool(made), found
    assert made or "it was not made" in found.text


def test_elements_far_below_the_largest_are_told(tmp_path: Path) -> None:
    def uneven(step: int) -> Batch:
        x, y = batch(step)
        return x * torch.tensor([1e6] + [1.0] * (WIDTH - 1)), y

    found = judged(tmp_path, batches=uneven, build=lambda: nn.Linear(WIDTH, WIDTH, bias=False))
    assert found.equal and "hardly judged: 1 gradient most of whose elements are far below the largest (weight)" in str(
        found
    )
