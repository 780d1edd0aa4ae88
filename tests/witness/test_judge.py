"""Right loops, unusual ones too, are that of a single process; wrong ones are named: what, where, by which factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Made
from judged_cases import WIDTH, Batch, adamw, backward, batch, judged, squares
from loops import run, run_cut, the_job
from torch import Tensor, nn

import plait
from plait.referee.witness.judge import judge


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw", "steps": 30}, {"clip": 0.05}], ids=str)
def test_a_right_loop_is_the_run_of_a_single_process(
    tmp_path: Path, ranks: int, calls: int, settings: dict[str, Any]
) -> None:
    run(tmp_path / "w", ranks=ranks, calls=calls, **settings)
    found = judge(the_job(settings.get("optimizer", "sgd")), tmp_path / "w", clip=settings.get("clip"))
    assert found.equal and found.residual < 1e-5, found
    assert found.text.startswith(f"{settings.get('steps', 3)} steps of "), found
    assert "not judged" not in found.text, found


def test_in_double_precision_it_is_held_tighter(tmp_path: Path) -> None:
    run(tmp_path / "w", dtype=torch.float64, calls=2)
    found = judge(the_job(dtype="fp64"), tmp_path / "w")
    assert found.equal and found.residual < 1e-13, found


def test_clipping_by_the_norm_of_the_own_pieces(tmp_path: Path) -> None:
    run_cut(tmp_path / "right", local_norm=False)
    assert judge(the_job(), tmp_path / "right", clip=0.05).equal
    run_cut(tmp_path / "wrong", local_norm=True)
    found = judge(the_job(), tmp_path / "wrong", clip=0.05)
    assert (found.step, found.phase) == (0, "gradient"), found
    assert "the norm of its own pieces" in found.cause, found


def test_a_killed_run_is_judged_up_to_its_last_whole_step(tmp_path: Path) -> None:
    run(tmp_path / "w", kill=2, steps=4)
    found = judge(the_job(), tmp_path / "w")
    assert found.equal and found.text.startswith("3 steps of 2 ranks"), found
    (tmp_path / "w/rank-00001/step-000002.safetensors").unlink()
    assert judge(the_job(), tmp_path / "w").text.startswith("2 steps")


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def net(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), norm(6), nn.Tanh(), nn.Linear(6, WIDTH)).train()


normed = partial(judged, build=partial(net, nn.BatchNorm1d), optimizer=partial(torch.optim.SGD, lr=0.1), steps=2)


@pytest.mark.parametrize(("norm", "sizes"), [(nn.BatchNorm1d, None), (Frozen, [9, 3]), (nn.LayerNorm, [9, 3])])
def test_it_is_the_run_of_a_single_process(tmp_path: Path, norm: type[nn.Module], sizes: list[int] | None) -> None:
    found = normed(tmp_path, build=partial(net, norm), sizes=sizes)
    assert found.equal, found


@pytest.mark.parametrize("seed", [1, 11, 64])
def test_parts_of_a_batch_are_another_function(tmp_path: Path, seed: int) -> None:
    """With some weights the gradient of the bias before it, which is nothing but rounding, is 4 times another one's."""
    found = normed(tmp_path, sizes=[9, 3], seed=seed)
    assert found.phase == "gradient" and found.step == 0 and not found.equal
    assert "BatchNorm (1) normalises over the samples of each forward, 3 to 9 of the step's 12" in found.text, found
    assert "SyncBatchNorm" not in found.text, found


def test_another_fault_is_not_laid_on_it(tmp_path: Path) -> None:
    assert "normalises" not in normed(tmp_path / "cut", sizes=[9, 3], scale=2.0).text
    found = normed(tmp_path / "whole", scale=2.0)
    assert found.factor == pytest.approx(2.0) and "normalises" not in found.text, found


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


def loaded_late(model: nn.Module, step: int) -> None:
    if not step:  # weights that are loaded after the start are those of the job
        model.load_state_dict(wild().state_dict())
    x, y = batch(step)
    for part in zip(x.split(5), y.split(5), strict=True):
        (squares(model, part) / y.numel()).backward()


def test_a_model_that_makes_much_of_rounding_is_judged_step_by_step(tmp_path: Path) -> None:
    fast = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731
    found = judged(tmp_path, gradient=loaded_late, build=wild, steps=16, witnessed=16, optimizer=fast)
    assert found.equal and found.text.startswith("16 steps of 1 rank"), found


@pytest.mark.parametrize("build", [Centred, normalised])
def test_buffers_that_a_forward_changes_go_on_with_the_steps(build: Any, tmp_path: Path) -> None:
    assert judged(tmp_path, build=build).equal, "the loop draws other buffers than the job"


class Calls(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step()


def by_forward(model: nn.Module, step: int) -> None:
    x, y = batch(step)
    ((model.forward(x) - y).square().sum() / y.numel()).backward()


def looks_twice(model: nn.Module, step: int) -> None:
    model(batch(step)[0])  # to learn shapes, or to evaluate, with an unused graph
    model(batch(99)[0])
    backward(model, batch(step))


def test_right_loops_are_right(tmp_path: Path) -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch puts its hooks around the parent's step too
    own: Callable[[nn.Module], Any] = lambda model: Calls(model.parameters(), lr=1e-2)  # noqa: E731
    assert judged(tmp_path / "super", optimizers=own).equal
    assert judged(tmp_path / "forward", gradient=by_forward).equal
    assert judged(tmp_path / "twice", gradient=looks_twice).equal


def test_extra_forwards_do_not_hide_what_is_wrong(tmp_path: Path) -> None:
    def doubled(model: nn.Module, step: int) -> None:
        x, y = batch(step)
        model(x[:6])  # as a pipeline learns the shapes of a microbatch
        for part in zip(x.split(6), y.split(6), strict=True):
            (2 * squares(model, part) / y.numel()).backward()

    found = judged(tmp_path, gradient=doubled)
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
