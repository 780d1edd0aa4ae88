"""One process of ``plait.verify_resume`` on FSDP2 and torch.distributed.checkpoint: ``resume_ranks.py FILE``.

A program of torch alone is proved right, then each fault is planted; every rank writes what all of them raised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

import plait


class Program:
    """FSDP2 as people write it; the samples come from an iterator that cannot be inspected."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.4), nn.Linear(5, 3), nn.Linear(3, 2))
        self.model.register_buffer("scale", torch.tensor(2.0))
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2:].parameters(), "weight_decay": 0.2}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.made = 0
        self.skip(0)

    def skip(self, steps: int) -> None:
        sampler: DistributedSampler[int] = DistributedSampler(range(40), shuffle=True)  # type: ignore[arg-type]
        numbers = iter(sampler)
        self.batches = iter([[next(numbers) for _ in range(2)] for _ in range(10)])
        for _ in range(steps):
            next(self.batches)

    def step(self) -> Tensor:
        x = torch.tensor([[n, n / 2, 1.0] for n in next(self.batches)]).sin()
        loss: Tensor = (self.model(x) * self.model.scale).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.made += 1
        return loss

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "made": self.made,
            f"random {dist.get_rank()}": torch.get_rng_state(),
        }

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path, fault: Fault = lambda program, state: None, skipped: int = 0) -> None:
        """Lenient, as programs are that once had other keys; ``fault`` changes what is asked for."""
        state = self.state()
        fault(self, state)
        dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=False))
        if "optimizer" in state:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state.get("schedule", self.schedule.state_dict()))
        torch.set_rng_state(state.get(f"random {dist.get_rank()}", torch.get_rng_state()))
        self.made = state["made"]
        self.skip(self.made + skipped)


Fault = Callable[[Program, dict[str, Any]], Any]


FAULTS: dict[str, Fault] = {
    "moments": lambda program, state: state["optimizer"]["state"]["0.weight"].pop("exp_avg"),
    "parameter": lambda program, state: state["model"].pop("3.bias"),
    "one rank's random numbers": lambda program, state: state.pop("random 1", None),
}


def main(file: Path) -> None:
    comm = plait.join("shard=2", deadline=60)

    def verify(load: Callable[[Program, Path], Any]) -> str:
        try:
            report = plait.verify_resume(Program, Program.step, Program.save, load, steps=5, at=(2, 3), comm=comm)
        except AssertionError as error:
            return str(error)
        return str(report)

    said = {"right": verify(Program.load)}
    for name, fault in FAULTS.items():
        said[name] = verify(lambda program, folder, fault=fault: program.load(folder, fault))  # type: ignore[misc]
    said["again"] = verify(lambda program, folder: program.load(folder, skipped=-1))
    file.with_name(f"{comm.rank}.json").write_text(json.dumps(said))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
