"""``plait.verify_resume`` on what somebody's own classes keep where no ``state_dict()`` has it, and on libraries'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import plait
from plait.comm import Comm


class Net(nn.Module):
    """Keeps what each forward makes anew: no state, whatever it is right behind a load."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(2))
        self.name, self.width, self.labels = "net", 0, numpy.array(["a"])
        self.mask: Tensor | None = None
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(2)
        self.width, self.mean = x.shape[1], x.mean().item()
        self.seen = self.drop(self.linear(x)) * self.scale * self.mask
        return self.seen


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Anneals(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heat = torch.tensor(1.0)

    @torch.no_grad()
    def cool(self) -> None:
        self.heat = self.heat * 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.cool()
        return super().forward(x)


@dataclass(slots=True)
class Best:
    loss: float = 1e9
    bad: int = 0

    def see(self, loss: float) -> None:
        self.bad, self.loss = self.bad + 1, min(loss, self.loss)


class Stopper:
    """Its state_dict() forgets a field."""

    def __init__(self, kept: tuple[str, ...] = ("best", "bad")) -> None:
        self.best, self.bad, self.kept = 1e9, 0, kept

    def see(self, loss: float) -> None:
        self.best, self.bad = min(loss, self.best), self.bad + 1

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Warm(lr_scheduler.LRScheduler):
    """A schedule of one's own, which counts beside what torch's state has."""

    def __init__(self, optimizer: Optimizer, *, forgets: bool = False) -> None:
        self.asked, self.forgets = 0, forgets
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.asked += 1
        return [rate * 0.9**self.last_epoch for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "asked" or not self.forgets}


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index)).sin()


class Late:
    """A loader that takes what it has loaded when it is asked for the next batch."""

    def __init__(self) -> None:
        self.data, self.place, self.loaded = Points(), 0, -1

    def next(self) -> Tensor:
        if self.loaded >= 0:
            self.place, self.loaded = self.loaded, -1
        self.place += 2
        return torch.stack([self.data[self.place % 30], self.data[(self.place + 1) % 30]])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.loaded if self.loaded >= 0 else self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


class Stock:
    """torchdata's loader, whose iterator is an attribute."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(5)
        self.loader: Any = StatefulDataLoader(Points(), batch_size=2, shuffle=True, generator=draws)
        self.batches: Any = None

    def next(self) -> Tensor:
        self.batches = self.batches or iter(self.loader)
        batch: Tensor = next(self.batches)
        return batch


Schedule = Callable[[Optimizer], Any]
STEPS: Schedule = partial(lr_scheduler.StepLR, step_size=2)


class Program:
    def __init__(
        self,
        net: Callable[[], nn.Module] = Net,
        keeps: Callable[[], Any] = Stopper,
        schedule: Schedule = STEPS,
        data: Callable[[], Any] = Late,
    ) -> None:
        self.model, self.best = net(), keeps()
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = schedule(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.data = data()
        self.draws, self.numpy = torch.Generator().manual_seed(1), numpy.random.default_rng(2)

    def step(self) -> Tensor:
        x = self.data.next() + torch.rand((), generator=self.draws) + float(self.numpy.random())
        loss: Tensor = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step(*[loss.item()] * isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau))
        self.ema.update_parameters(self.model)
        self.best.see(loss.item())
        return loss

    def parts(self) -> dict[str, Any]:
        data = self.data if isinstance(self.data, Late) else self.data.loader
        stateful = {"best": self.best} if isinstance(self.best, Stopper) else {}
        own = {name: getattr(self, name) for name in ("model", "ema", "optimizer", "schedule", "scaler")}
        return own | stateful | {"data": data}

    def save(self, folder: Path) -> None:
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {"draws": self.draws.get_state(), "numpy": self.numpy.bit_generator.state}
        torch.save(state | {"random": torch.get_rng_state()}, folder / "all.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "all.pt", weights_only=False)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.draws.set_state(saved["draws"])
        self.numpy.bit_generator.state = saved["numpy"]
        torch.set_rng_state(saved["random"])


class Whole(Program):
    """Says what goes on by a state_dict() of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {f"the {name}": part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(state[f"the {name}"])


def verify(begin: Callable[[], Program], load: Callable[[Program, Path], Any] = Program.load) -> Any:
    return plait.verify_resume(begin, Program.step, Program.save, load, steps=5)


FORGOTTEN: dict[str, tuple[Callable[[], Program], str]] = {
    "slots": (
        partial(Program, keeps=Best),
        "after the load of step 2, program.best.bad is 0 and was 2 (as it was before the load)",
    ),
    "a field beside a state_dict()": (
        partial(Program, keeps=partial(Stopper, kept=("best",))),
        "after step 3, program.best.bad is 1 and was 3 (as it is after step 1)",
    ),
    "the same in a program with a state_dict()": (
        partial(Whole, keeps=partial(Stopper, kept=("best",))),
        "after step 3, program.best.bad is 1 and was 3 (as it is after step 1)",
    ),
    "slots in a program with a state_dict()": (
        partial(Whole, keeps=Best),
        "after step 3, program.best.bad is 1 and was 3 (as it is after step 1)",
    ),
    "a field of a schedule": (
        partial(Program, schedule=partial(Warm, forgets=True)),
        "after step 3, program.schedule.asked is 2 and was 4",
    ),
    "a module's number": (
        partial(Program, net=lambda: nn.Sequential(Counts())),
        "after step 3, the attribute '0.calls' of program.model (neither parameter nor buffer) is 1 and was 3",
    ),
    "a module's tensor": (
        partial(Program, net=Anneals),
        "after step 3, the attribute 'heat' of program.model (neither parameter nor buffer) is 0.5 and was 0.125",
    ),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_what_no_state_dict_has_is_named(forgotten: str) -> None:
    begin, words = FORGOTTEN[forgotten]
    with pytest.raises(AssertionError) as caught:
        verify(begin)
    assert str(caught.value).startswith(words), str(caught.value)


def test_it_is_right_once_it_is_restored() -> None:
    def load(program: Program, folder: Path) -> None:
        program.load(folder)
        made = int(next(iter(program.optimizer.state_dict()["state"].values()))["step"])
        assert isinstance(program.model, Counts)
        program.model.calls = made
        for _ in range(made):
            program.best.bad += 1

    assert verify(partial(Program, net=Counts, keeps=partial(Stopper, kept=("best",))), load).equal


SCHEDULES: dict[str, Schedule] = {
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "SWALR": partial(SWALR, swa_lr=0.05),
    "own": Warm,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_is_accused(schedule: str) -> None:
    assert verify(partial(Program, schedule=SCHEDULES[schedule])).equal


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [Program, Whole])
@pytest.mark.parametrize("data", [Late, Stock])
def test_no_loader_is_accused(kind: type[Program], data: Callable[[], Any]) -> None:
    assert verify(partial(kind, data=data)).equal


class Ranked:
    """A model that counts its calls, in an engine."""

    def __init__(self, comm: Comm) -> None:
        self.model = nn.Sequential(Net(), nn.Linear(2, 3), Counts())
        with torch.no_grad():  # threads share torch's generator
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.engine = plait.Engine(self.model, comm, strategy="zero3", optimizer=self.optimizer)

    def step(self) -> Tensor:
        self.engine.backward(self.model(torch.ones(2, 3)).square().sum(), 4)
        self.optimizer.step()
        return torch.tensor(self.engine.last.loss)


@pytest.mark.parametrize("restored", [True, False])
def test_a_module_of_an_engine(restored: bool) -> None:
    def load(program: Ranked, folder: Path) -> None:
        plait.load(folder, program.engine)
        if restored:
            program.model[2].calls = program.engine.step_state()["step"]

    def body(comm: Comm) -> str:
        try:
            return str(
                plait.verify_resume(
                    partial(Ranked, comm), Ranked.step, lambda p, folder: plait.save(folder, p.engine), load, comm=comm
                )
            )
        except AssertionError as error:
            return str(error)

    words = (
        "the run that was stopped is" if restored else "after step 3, the attribute '2.calls' of program.engine (nei"
    )
    for said in plait.run_threads("shard=2", body, deadline=30):
        assert said.startswith(words), said
