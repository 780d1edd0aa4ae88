"""Processes of a pipeline that fail as the first word says, on the rank that the second names; run by
test_failures.py.  ``memory`` fails nowhere: it prints the losses, and for each rank how many of
its messages were under way at most, and are in the end."""

from __future__ import annotations

import sys

import torch
from engine_cases import Batch, adamw, batches, count, deal, loss_sum
from pipeline_cases import chain, linear
from torch import Tensor, nn

from plait.comm import ProcessComm
from plait.comm.base import Comm
from plait.run.launch.failure import guarded
from plait.run.launch.local import launch
from plait.run.measure.comm import BenchConfig
from plait.step import Engine

HOW, WHERE = sys.argv[1], int(sys.argv[2])
MICROBATCHES, SAMPLES = 12, 10


class Failing(nn.Module):
    """Raises in the third forward, or in the backward of what came third."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.calls = -1, 0

    def fail(self, *_: object) -> None:
        raise ArithmeticError("of the user's own")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rank == WHERE and self.calls == 3:
            if HOW == "forward":
                self.fail()
            if HOW == "backward":
                x = x * 1
                x.register_hook(self.fail)
        return x


def body(comm: Comm) -> int:
    assert isinstance(comm, ProcessComm)
    under_way: list[int] = []
    model = chain(*(nn.Sequential(linear(), Failing()) for _ in range(3)))
    calls = 0

    def loss(stage: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        under_way.append(len(comm.sends))
        if HOW == "loss" and comm.rank == WHERE and calls == 3:
            raise ArithmeticError("of the user's own")
        return loss_sum(stage, batch)

    for module in model.modules():
        if isinstance(module, Failing):
            module.rank = comm.rank
    engine = Engine(
        model, comm, strategy="ddp", optimizer=adamw(model.parameters()), loss_fn=loss, count_fn=count, clip=1.0
    )
    results = [engine.step(deal(batch, comm.mesh, comm.rank, MICROBATCHES)) for batch in batches(2, samples=SAMPLES)]
    most = torch.empty(2 * comm.mesh.size, dtype=torch.int64)
    comm.all_gather(most, torch.tensor([max(under_way), len(comm.sends)]), ("pipe",)).wait()
    print(*(result.loss for result in results))
    print(*most.tolist())
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(guarded(lambda: launch(BenchConfig(mesh="pipe=3", deadline=3600), body, sys.argv)))
