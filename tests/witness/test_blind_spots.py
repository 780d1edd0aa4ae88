"""Where a judge might look away: steps that are not made, gradients that one side has, numbers that are not finite, and
right loops that do things in another way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import plait
from plait.witness.judgement import Judgement

Batch = tuple[Tensor, ...]
Body = Callable[[nn.Module, Any, int], None]
WIDTH = 8


def batch(step: int) -> Batch:
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def squares(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return loss


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def judged(
    path: Path,
    body: Body | None = None,
    *,
    build: Callable[[], nn.Module] = net,
    loss: Callable[[nn.Module, Batch], Tensor] = squares,
    batches: Callable[[int], Batch] = batch,
    optimizer: Callable[[Any], Any] = adamw,
    optimizers: Callable[[nn.Module], Any] | None = None,
    steps: int = 3,
    elements: int | None = None,
    witnessed: int = 10,
    due: int | None = None,
    **settings: Any,
) -> Judgement:
    """The judgement of a loop of one process; ``body`` is its step, the plain one if it is None."""
    job = plait.UserJob(build, loss, batches, lambda b: b[1].numel(), optimizer)
    torch.manual_seed(1)
    model = build()
    own = optimizers(model) if optimizers else optimizer(model.parameters())
    with plait.witness(model, own, path / "w", elements=elements, steps=witnessed):
        for step in range(steps):
            if body is not None:
                body(model, own, step)
            else:
                backward(model, batches(step), loss)
                own.step()
                own.zero_grad()
    return plait.judge(job, path / "w", steps=due, **settings)


def backward(model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor] = squares) -> None:
    (loss(model, batch) / batch[1].numel()).backward()


# ---- steps that are not made ----------------------------------------------------------------------------------------


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [adamw([*model[0].parameters(), *model[2].parameters()]), adamw(model[1].parameters())]  # type: ignore[index]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            (),
            "of 1.weight: it was not made, nor were those of 1 other: its optimizer, number 1, made none of 3 steps",
        ),
        ((0, 2), "not judged: 2 parameters in 1 step that optimizer number 1 did not make (1)"),
        ((0, 1, 2), "the run of a single process"),
    ],
)
def test_an_optimizer_that_makes_no_step_is_told(made: tuple[int, ...], says: str, tmp_path: Path) -> None:
    def body(model: nn.Module, optimizers: Any, step: int) -> None:
        backward(model, batch(step))
        for optimizer in optimizers[: 1 + (step in made)]:
            optimizer.step()
        model.zero_grad()

    found = judged(tmp_path, body, optimizers=two_optimizers)
    assert says in found.text and found.equal == bool(made), found
    assert ("not judged" in found.text) == (made == (0, 2))


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


def test_what_an_earlier_version_has_witnessed_is_judged(tmp_path: Path) -> None:
    assert judged(tmp_path, steps=2).equal
    about = {"steps": 2, "all": True, "calls": 0, "late": []}  # forwards were counted, and are listed now
    save_file({}, tmp_path / "w/rank-00000/end.safetensors", {"plait": json.dumps(about)})
    job = plait.UserJob(net, squares, batch, lambda b: b[1].numel(), adamw)
    assert plait.judge(job, tmp_path / "w").equal


def test_optimizers_that_had_no_turn_yet_are_told_and_not_accused(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizers: Any, step: int) -> None:
        backward(model, batch(step))
        optimizers[0].step()
        model.zero_grad()

    found = judged(tmp_path, body, optimizers=two_optimizers, steps=1)
    assert found.equal and "not judged: 2 parameters in 1 step that optimizer number 1" in found.text


# ---- gradients that one side has ------------------------------------------------------------------------------------


class Heads(nn.Module):
    """One of two heads is used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y: Tensor = self.heads[int(which[0])](x)
        return y


def of_heads(step: int) -> Batch:
    return (*batch(step), torch.full((12,), step % 2))


def loss_of_heads(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0], batch[2]) - batch[1]).square().sum()
    return loss


@pytest.mark.parametrize(
    ("idle", "says"),
    [
        (
            "left",
            "step 1, gradient of heads.0.bias: the one rank: the job gives it none, and the optimizer was given ",
        ),
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

    found = judged(tmp_path, body, build=Heads, loss=loss_of_heads, batches=of_heads)
    assert says in found.text and found.equal == (idle == "none"), found
    assert ("zero_grad leaves it out" in found.text) == (idle == "left")


class Gated(nn.Module):
    """In odd steps the gradient of the gate is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, on: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (1 + self.gate * on[:, None])
        return y


def gated(step: int) -> Batch:
    return (*batch(step), torch.full((12,), 1.0 - step % 2))


@pytest.mark.parametrize("drops", [True, False])
def test_none_where_the_gradient_is_zero_is_another_update(drops: bool, tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any, step: int) -> None:
        backward(model, gated(step), loss_of_heads)
        if drops and not model.gate.grad.any():
            model.gate.grad = None
        optimizer.step()
        optimizer.zero_grad()

    found = judged(tmp_path, body, build=Gated, loss=loss_of_heads, batches=gated)
    assert found.equal == (not drops) and ("its gradient is None, and the job's is zeros" in found.text) == drops


# ---- numbers that hide, or are none ---------------------------------------------------------------------------------


def spoilt(step: int) -> Batch:
    x, y = batch(step)
    if step:
        x[0, 0] = torch.inf
    return x, y


@pytest.mark.parametrize("masks", [True, False])
def test_a_gradient_that_is_not_finite_ends_the_judgement_and_excuses_nothing(masks: bool, tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, spoilt(step))
        for parameter in model.parameters() if masks and step else ():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    found = judged(tmp_path, body, batches=spoilt)
    assert found.equal == (not masks)
    says = (
        "it is finite where the job's own gradient is not"
        if masks
        else "not judged from step 1 on, where the job's own"
    )
    assert says in found.text
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


@pytest.mark.parametrize("build", [Centred, normalised])
def test_buffers_that_a_forward_changes_go_on_with_the_steps(build: Any, tmp_path: Path) -> None:
    assert judged(tmp_path, build=build).equal, "the loop draws other buffers than the job"
    assert judged(tmp_path / "few", build=build, elements=3).equal


class Calls(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step()


def by_forward(model: nn.Module, optimizer: Any, step: int) -> None:
    x, y = batch(step)
    ((model.forward(x) - y).square().sum() / y.numel()).backward()
    optimizer.step()
    optimizer.zero_grad()


def looks_twice(model: nn.Module, optimizer: Any, step: int) -> None:
    model(batch(step)[0])  # to learn shapes, or to evaluate, with a graph that nobody uses
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
    """What is wrong behind the model is wrong in all of it, and began at its end."""
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
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.table(x)
            return y

    def words(step: int) -> Batch:
        return torch.arange(12) % (3 + step), batch(step)[1]

    assert judged(tmp_path, build=Words, batches=words, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).equal


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

    def shared(model: nn.Module) -> list[Any]:
        return [adamw(model.parameters()), adamw(model[1].parameters())]  # type: ignore[index]

    with pytest.raises(ValueError, match=r"'1.weight' is in two groups of the optimizers, and is updated twice a step"):
        judged(tmp_path / "shared", optimizers=shared)
