"""``plait.verify_resume`` on a plain loop that saves with ``torch.save``: right as it is, and every fault named."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import plait
from plait.referee.verify.program import fields_of


class Sampler:
    """Samples 0..10 in a new order for each epoch, three at a time."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)
        self.order, self.position = self.draw(), 0

    def draw(self) -> list[int]:
        return torch.randperm(11, generator=self.generator).tolist()

    def next(self) -> list[int]:
        if self.position + 3 > len(self.order):
            self.order, self.position = self.draw(), 0
        self.position += 3
        return self.order[self.position - 3 : self.position]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]
        self.generator.set_state(state["generator"])


class Stock:
    """torchdata's loader, whose iterator is an attribute."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(5)
        self.loader: Any = StatefulDataLoader([n % 11 for n in range(30)], batch_size=3, shuffle=True, generator=draws)
        self.batches: Any = None

    def next(self) -> list[int]:
        self.batches = self.batches or iter(self.loader)
        batch: Tensor = next(self.batches)
        return batch.tolist()


@dataclass(slots=True)
class Best:
    loss: float = 1e9
    bad: int = 0


def halved(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


class Program:
    """A loop as people write it."""

    def __init__(self, schedule: Callable[[Optimizer], Any] = halved, sampler: Callable[[], Any] = Sampler) -> None:
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Linear(5, 2))
        self.model.register_buffer("scale", torch.tensor(2.0))
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
        self.schedule = schedule(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.sampler = sampler()
        self.draws, self.numpy = torch.Generator().manual_seed(1), numpy.random.default_rng(2)
        self.best, self.recent, self.seen = Best(), deque[float](maxlen=3), set[int]()
        self.data = [torch.full((3,), float(n)).sin() for n in range(11)]
        self.steps_made = 0
        self.progress = Progress(disable=True)  # an installed package's object may keep what it likes

    def step(self) -> Tensor:
        samples = self.sampler.next()
        random.random()
        x = torch.stack([self.data[n] for n in samples]) + torch.rand((), generator=self.draws)
        x = x + float(self.numpy.random())
        loss: Tensor = (self.model(x) * self.model.scale).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step(*[loss.item()] * isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau))
        self.ema.update_parameters(self.model)
        self.steps_made, self.best.bad = self.steps_made + 1, self.best.bad + 1
        self.recent.append(loss.item())
        self.progress.add_task("a step")
        self.seen.update(samples)
        return loss

    PARTS = ("model", "ema", "optimizer", "schedule", "scaler", "sampler")

    def save(self, path: Path) -> None:
        state = {name: self.part(name).state_dict() for name in self.PARTS}
        numbers = {"torch": torch.get_rng_state(), "python": random.getstate(), "made": self.steps_made}
        own = {"draws": self.draws.get_state(), "numpy": self.numpy.bit_generator.state}
        own |= {"bad": self.best.bad, "recent": self.recent, "seen": self.seen}
        torch.save({**state, **numbers, **own}, path / "all.pt")

    def part(self, name: str) -> Any:
        found = getattr(self, name)
        return found.loader if isinstance(found, Stock) else found

    def load(self, path: Path, fault: Callable[[Program, dict[str, Any]], None] | None = None) -> None:
        saved = torch.load(path / "all.pt", weights_only=False)
        strict = fault is None
        if fault is not None:
            fault(self, saved)
        self.model.load_state_dict(saved["model"], strict=strict)
        for name in self.PARTS[1:]:
            if name in saved:
                self.part(name).load_state_dict(saved[name])
        if "torch" in saved:
            torch.set_rng_state(saved["torch"])
        if "python" in saved:
            random.setstate(saved["python"])
        self.draws.set_state(saved["draws"])
        self.numpy.bit_generator.state = saved["numpy"]
        self.steps_made, self.best.bad = saved["made"], saved["bad"]
        self.recent, self.seen = saved["recent"], saved["seen"]


def verify(load: Callable[[Program, Path], Any] = Program.load, **settings: Any) -> Any:
    return plait.verify_resume(Program, Program.step, Program.save, load, **settings)


def test_a_state_that_another_rank_has() -> None:
    """ZeroRedundancyOptimizer leaves None for it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = None
    assert {field.kind for field in fields_of([optimizer], shared_random=False)} >= {"group"}


def test_the_right_one_is_right() -> None:
    before = torch.get_rng_state(), random.getstate()
    report = verify()
    assert "to the bit" in str(report)
    kinds = {"parameter", "buffer", "optimizer", "group", "state", "random", "generator", "samples", "loss"}
    assert report.compared.keys() == kinds
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1], "left as they were"
    verify(at=(1, 4, 5), state=lambda program: {"all": [program.model, program.sampler.position]})


BEGUN: dict[str, Callable[[], Program]] = {
    "plateau": partial(Program, partial(lr_scheduler.ReduceLROnPlateau, patience=1)),
    "one cycle": partial(Program, partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30)),
    "lambda": partial(Program, partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch)),
    "SWALR": partial(Program, partial(SWALR, swa_lr=0.05)),
    "torchdata": partial(Program, sampler=Stock),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("begun", BEGUN)
def test_no_schedule_and_no_loader_is_accused(begun: str) -> None:
    plait.verify_resume(BEGUN[begun], Program.step, Program.save, Program.load)


Fault = Callable[[Program, dict[str, Any]], None]


def lost(*path: Any) -> Fault:
    """The saved state lacks this."""

    def change(program: Program, saved: dict[str, Any]) -> None:
        *above, last = path
        del reduce(getitem, above, saved)[last]

    return change


def put(value: Any, *path: Any) -> Fault:
    """The saved state has another value there."""

    def change(program: Program, saved: dict[str, Any]) -> None:
        *above, last = path
        reduce(getitem, above, saved)[last] = value

    return change


def renamed(program: Program, saved: dict[str, Any]) -> None:
    saved["model"]["0.wieght"] = saved["model"].pop("0.weight")


def fresh_momentum(program: Program, saved: dict[str, Any]) -> None:
    for own in saved["optimizer"]["state"].values():
        own["exp_avg"].zero_()


FIRST, SECOND = (("optimizer", "param_groups", group) for group in (0, 1))
FAULTS: dict[str, tuple[Fault, str]] = {
    "fresh optimizer": (lost("optimizer"), "the step of '0.weight' in program.optimizer is not there: it is fresh"),
    "fresh momentum": (fresh_momentum, "the exp_avg of '0.weight' in program.optimizer is fresh: all zeros"),
    "lost schedule": (lost("schedule"), "the last_epoch of program.schedule is 0 and was 2 (as it was before"),
    "a step more": (put(3, "schedule", "last_epoch"), "the last_epoch of program.schedule is 3 and was 2 (as it is a"),
    "rate overwritten": (put(0.1, *FIRST, "lr"), "the learning rate of group 0 of program.optimizer is 0.1 and"),
    "an option lost": (lost(*SECOND, "initial_lr"), "the initial_lr of group 1 of program.optimizer is not there"),
    "another option": (put(0.01, *SECOND, "weight_decay"), "the weight_decay of group 1 of program.optimizer is 0.01"),
    "a sample again": (put(3, "sampler", "position"), "the position of program.sampler is 3 and was 6"),
    "lost random numbers": (lost("torch"), "the state of torch's random numbers (CPU) is another"),
    "lost Python's": (lost("python"), "the state of Python's random is another"),
    "a buffer left out": (lost("model", "1.running_mean"), "the buffer '1.running_mean' of program.model is fresh"),
    "lost average": (lost("ema"), "the parameter 'module.0.weight' of program.ema differs by up to"),
    "lost loss scale": (lost("scaler"), "the scale of program.scaler is 8.0 and was 16.0 (as it was before the"),
    "a renamed key": (renamed, "the parameter '0.weight' of program.model differs by up to"),
    "slots": (put(0, "bad"), "program.best.bad is 0 and was 2 (as it was before the load)"),
    "a deque": (lambda program, saved: saved["recent"].clear(), "program.recent.0 is not there, and was"),
    "a set": (lambda program, saved: saved["seen"].clear(), "program.seen.0 is not there, and was"),
    "a generator": (
        lambda program, saved: saved.__setitem__("draws", program.draws.get_state()),
        "the state of program.draws is another (as it was before the load)",
    ),
    "a counter": (put(0, "made"), "program.steps_made is 0 and was 2 (as it was before the load)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_first(fault: str) -> None:
    change, words = FAULTS[fault]
    with pytest.raises(AssertionError) as caught:
        verify(lambda program, path: program.load(path, change))
    assert str(caught.value).startswith(f"after the load of step 2, {words}"), str(caught.value)
    assert "compared, by kind: samples " in str(caught.value)


class Hidden:
    """Its position is hidden in an iterator."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = iter([torch.full((1, 2), float(n)) for n in range(20)])
        self.shift = [0.0]

    def skip(self, number: int) -> None:
        for _ in range(number):
            next(self.batches)

    def step(self) -> Tensor:
        loss: Tensor = (self.model(next(self.batches)) + self.shift.pop()).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.shift.append(0.0)
        return loss

    def save(self, path: Path) -> None:
        torch.save(self.model.state_dict(), path / "model.pt")

    def load(self, path: Path, skipped: int) -> None:
        self.model.load_state_dict(torch.load(path / "model.pt"))
        self.skip(skipped)


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        (2, ""),
        (0, "step 3 trained on the samples of step 1 again"),
        (3, "step 3 trained on the samples of step 4: its own were skipped"),
        (15, "step 3 trained on samples of no step of the uninterrupted run"),
    ],
)
@pytest.mark.parametrize("told", [False, True])
def test_samples_that_only_the_step_shows(skipped: int, words: str, told: bool) -> None:
    def step(program: Hidden) -> Any:
        if not told:
            return program.step()
        batch = next(program.batches)
        return torch.ones(()), batch.view(-1).tolist()

    with pytest.raises(AssertionError, match=words) if words else nullcontext():
        plait.verify_resume(Hidden, step, Hidden.save, partial(Hidden.load, skipped=skipped), at=(2,))


def test_what_is_not_in_the_state_shows_in_the_loss() -> None:
    """Weights that become active a step later: what is computed with is not what was loaded."""

    def load(program: Hidden, path: Path) -> None:
        program.load(path, skipped=2)
        program.shift[0] = 1.0

    state: Callable[[Hidden], Any] = lambda program: {"model": program.model, "optimizer": program.optimizer}  # noqa: E731
    with pytest.raises(AssertionError, match=r"the loss of step 3 differs|the loss of step 3 is .* become active"):
        plait.verify_resume(Hidden, Hidden.step, Hidden.save, load, state=state, at=(2,))


def test_what_is_wrong_with_the_question_is_said() -> None:
    with pytest.raises(ValueError, match=r"stops after \[3, 2\] of 6 steps: give rising numbers from 1 to 5"):
        verify(at=(3, 2))
    torn = iter(range(100))

    def other() -> Program:
        program = Program()
        program.steps_made = next(torn)
        return program

    with pytest.raises(ValueError, match="not the same run twice"):
        plait.verify_resume(other, Program.step, Program.save, Program.load)

    def spoils(program: Program, path: Path) -> None:
        program.save(path)
        program.schedule.step()

    with pytest.raises(AssertionError, match=r"saving after step 2 has changed the program: the last_epoch of"):
        plait.verify_resume(Program, Program.step, spoils, Program.load)
