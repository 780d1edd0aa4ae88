"""Processes of a pipeline, run by test_p2p.py: they print the losses, and for each rank how many of its messages
were under way at most, and are in the end."""

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


def body(comm: Comm) -> int:
    assert isinstance(comm, ProcessComm)
    under_way: list[int] = []
    model = chain(*(linear() for _ in range(3)))

    def loss(stage: nn.Module, batch: Batch) -> Tensor:
        under_way.append(len(comm.sends))
        return loss_sum(stage, batch)

    optimizer = adamw(model.parameters())
    engine = Engine(model, comm, strategy="ddp", optimizer=optimizer, loss_fn=loss, count_fn=count, clip=1.0)
    results = [engine.step(deal(batch, comm.mesh, comm.rank, 12)) for batch in batches(2, samples=10)]
    most = torch.empty(2 * comm.mesh.size, dtype=torch.int64)
    comm.all_gather(most, torch.tensor([max(under_way), len(comm.sends)]), ("pipe",)).wait()
    print(*(result.loss for result in results))
    print(*most.tolist())
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(guarded(lambda: launch(BenchConfig(mesh="pipe=3", deadline=3600), body, sys.argv)))
