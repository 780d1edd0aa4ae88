"""A pipeline of two stages by remote calls: rank 0 has the first stage, and calls the second with each activation.

torchrun --nproc-per-node 2 examples/remote_pipeline.py

It trains as plait's own pipeline does under 1F1B, to the bit: microbatches go forward and backward in one order.
"""

import sys
from collections import deque

import torch
from torch import nn

import plait
import plait.remote


def make_model():
    torch.manual_seed(0)
    first = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32)]
    return nn.Sequential(*first, nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def make_data(step, microbatches=4):
    rng = torch.Generator().manual_seed(step)
    return [(torch.randn(6, 16, generator=rng), torch.randn(6, 1, generator=rng)) for _ in range(microbatches)]


def loss_of(out, y):
    return (out - y).square().sum()


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def train(comm, steps=3):
    """Returns this rank's stage, trained."""
    stage = make_model()[3 * comm.rank : 3 * comm.rank + 3]
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)

    def microbatch(x, y, count):
        """Runs the second stage forward and backward: its part of the mean, and the gradient of what it received."""
        x.requires_grad_()
        loss = loss_of(stage(x), y) / count
        loss.backward()
        return loss, x.grad

    functions = {"microbatch": microbatch, "update": lambda: update(optimizer)}
    with plait.remote.connect(comm, functions if comm.rank == 1 else {}, threads=1) as remote:
        for step in range(steps) if comm.rank == 0 else ():
            under_way, total, data = deque(), 0.0, make_data(step)
            count = sum(len(y) for _, y in data)
            for x, y in [*data, (None, None)]:
                if x is not None:  # one microbatch is ahead of the one that goes backward
                    h = stage(x)
                    under_way.append((h, remote.call(1, "microbatch", h, y, count)))
                if len(under_way) == 2 or x is None:
                    h, call = under_way.popleft()
                    loss, gradient = call.result()
                    h.backward(gradient)
                    total += loss.item()
            there = remote.call(1, "update")
            update(optimizer)
            there.result()
            print(f"step {step}: loss {total:.5f}", flush=True)
    return stage


if __name__ == "__main__":
    try:
        comm = plait.join("pipe=2")
    except ValueError as error:  # another number of ranks
        print(f"{sys.argv[0]}: two stages are two ranks: {error}", file=sys.stderr)
        sys.exit(2)
    train(comm)
    comm.close()
