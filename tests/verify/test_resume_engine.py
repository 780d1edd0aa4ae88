"""``plait.verify_resume`` on plait's own save and load: an average, a schedule, dropout; and faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import Comm


class Program:
    """A user's loop on one rank of several."""

    def __init__(self, comm: Comm, strategy: str = "zero3") -> None:
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.4), nn.Linear(5, 3), nn.Linear(3, 2))
        self.model.register_buffer("scale", torch.tensor(2.0))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.linspace(-1, number / 9, parameter.numel()).view(parameter.shape))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2:].parameters(), "weight_decay": 0.2}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.engine = plait.Engine(self.model, comm, strategy=strategy, optimizer=self.optimizer)
        self.ema = plait.EMA(self.engine, 0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.data = plait.rank_batches(range(20), 4, comm, shuffle=True)  # type: ignore[arg-type]
        self.position = 0

    def step(self) -> tuple[Tensor, list[int]]:
        epoch, place = divmod(self.position, len(self.data))
        self.data.set_epoch(epoch)
        samples = list(self.data)[place]
        self.position += 1
        x = torch.tensor([[n, n / 2, 1.0] for n in samples]).sin()
        loss = F.mse_loss(self.model(x), torch.ones(len(samples), 2), reduction="sum") * self.model.scale
        self.engine.backward(loss, 2 * len(samples))
        self.optimizer.step()
        self.schedule.step()
        self.ema.update()
        return torch.tensor(self.engine.last.loss), samples

    def save(self, folder: Path) -> None:
        extra = {"schedule": self.schedule.state_dict(), "position": self.position}
        plait.save(folder, self.engine, ema=self.ema, extra=extra)

    def load(self, folder: Path) -> None:
        extra = plait.load(folder, self.engine, ema=self.ema).extra
        self.schedule.load_state_dict(extra["schedule"])
        self.position = extra["position"]


def verify(
    load: Callable[[Program, Path], Any] = Program.load,
    save: Callable[[Program, Path], Any] = Program.save,
    mesh: str = "shard=2",
    strategy: str = "zero3",
) -> list[Any]:
    def body(comm: Comm) -> Any:
        return plait.verify_resume(lambda: Program(comm, strategy), Program.step, save, load, at=(2, 3, 5), comm=comm)

    return plait.run_threads(mesh, body, deadline=30)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("shard=1", "ddp"), ("shard=3", "zero3"), ("replica=2 shard=2", "psdp"), ("shard=2", "zero1")],
)
def test_plait_is_right(mesh: str, strategy: str) -> None:
    for report in verify(mesh=mesh, strategy=strategy):
        kinds = {"parameter", "buffer", "average", "optimizer", "group", "state", "samples", "loss"}
        assert report.compared.keys() == kinds


def put_model(program: Program, state: dict[str, Tensor]) -> None:
    program.engine.load_full_state_dict({**program.engine.full_state_dict(), **state})


PARTS: dict[str, tuple[Callable[[Program], Any], Callable[[Program, Any], Any]]] = {
    "model": (lambda p: p.engine.full_state_dict(), put_model),
    "optimizer": (lambda p: p.engine.optimizer_state_dict(), lambda p, own: p.engine.load_optimizer_state_dict(own)),
    "run": (lambda p: p.engine.step_state(), lambda p, own: p.engine.load_step_state(own)),
    "ema": (lambda p: p.ema.full_state_dict(), lambda p, own: p.ema.load_full_state_dict(own)),
    "schedule": (lambda p: p.schedule.state_dict(), lambda p, own: p.schedule.load_state_dict(own)),
    "position": (lambda p: p.position, lambda p, own: setattr(p, "position", own)),
}


def whole(program: Program, folder: Path) -> None:
    """A user's save, made from the engine's state."""
    torch.save({name: get(program) for name, (get, _) in PARTS.items()}, folder / f"{program.comm.rank}.pt")


def taken(program: Program, folder: Path, lost: str = "") -> None:
    for name, own in torch.load(folder / f"{program.comm.rank}.pt").items():
        if name != lost:
            PARTS[name][1](program, own)


FAULTS = {
    "optimizer": "the step of '0.weight' in program.engine.optimizer is not there: it is fresh",
    "model": "the parameter '0.weight' of program.engine differs by up to",
    "ema": "the average of '0.weight' in program.ema differs by up to",
    "run": "the step of program.engine is 0 and was 2 (as it was before the load)",  # the position of dropout
}


@pytest.mark.parametrize("lost", FAULTS)
def test_every_part_that_is_lost_is_named_first(lost: str) -> None:
    with pytest.raises(AssertionError) as caught:
        verify(lambda program, folder: taken(program, folder, lost), whole)
    assert str(caught.value).startswith(f"after the load of step 2, {FAULTS[lost]}"), str(caught.value)


def test_whole_states_without_a_fault_are_right() -> None:
    verify(taken, whole)


def test_a_rank_that_is_wrong_is_named_on_all() -> None:
    def load(program: Program, folder: Path) -> None:
        program.load(folder)
        program.position += program.comm.rank == 1

    def body(comm: Comm) -> str:
        with pytest.raises(AssertionError) as caught:
            plait.verify_resume(lambda: Program(comm), Program.step, Program.save, load, comm=comm)
        return str(caught.value)

    for said in plait.run_threads("shard=3", body, deadline=30):
        assert said.startswith("rank 1: after the load of step 2, program.position is 3 and was 2 (as it is after st")
