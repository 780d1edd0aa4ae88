"""A parameter server by remote calls: rank 0 has the model and its optimizer, the others train on their part of the data.

torchrun --nproc-per-node 3 examples/parameter_server.py

A step ends when every trainer has pushed its gradients; they are added in the order of the ranks, so that runs repeat.
"""

import sys
import threading

import torch
from torch import nn

import plait
import plait.remote

STEPS, BATCH = 10, 12


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batch(step):
    rng = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=rng), torch.randn(BATCH, 1, generator=rng)


class Server:
    """The parameters, and the gradients of the step that is under way, by trainer."""

    def __init__(self, trainers):
        self.model, self.trainers = make_model(), trainers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.pushed, self.steps, self.changed = {}, 0, threading.Condition()

    def pull(self):
        return [p.detach() for p in self.model.parameters()]

    def push(self, trainer, gradients):
        """Returns the new parameters, once all trainers have pushed."""
        with self.changed:
            self.pushed[trainer], step = gradients, self.steps
            if len(self.pushed) == self.trainers:
                for p, *parts in zip(self.model.parameters(), *(self.pushed[t] for t in sorted(self.pushed))):
                    p.grad = sum(parts) / BATCH
                self.optimizer.step()
                self.pushed, self.steps = {}, self.steps + 1
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.steps > step)
            return self.pull()


def train(comm):
    """Returns the parameters after the last step; all ranks have the same."""
    trainers = comm.mesh.size - 1
    server = Server(trainers) if comm.rank == 0 else None
    functions = {"pull": server.pull, "push": server.push} if server else {}
    with plait.remote.connect(comm, functions, threads=trainers + 1) as remote:
        if comm.rank:
            model = make_model()
            values = remote.call(0, "pull").result()
            for step in range(STEPS):
                for p, value in zip(model.parameters(), values):
                    p.data.copy_(value)
                x, y = (whole.tensor_split(trainers)[comm.rank - 1] for whole in make_batch(step))
                loss = (model(x) - y).square().sum()
                gradients = torch.autograd.grad(loss, [*model.parameters()])
                values = remote.call(0, "push", comm.rank, list(gradients)).result()
    return server.pull() if server else values


if __name__ == "__main__":
    comm = plait.join()
    if comm.mesh.size < 2:
        print(f"{sys.argv[0]}: a server and its trainers are 2 ranks or more", file=sys.stderr)
        sys.exit(2)
    values = train(comm)
    print(f"rank {comm.rank}: {sum(value.sum().item() for value in values):.6f}", flush=True)
    comm.close()
