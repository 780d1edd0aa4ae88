"""One linear layer whose weight lies on four ranks: forward, backward, and the same with the layer's code unchanged.

    python lessons/one_linear_on_four_ranks.py

A weight of 10 rows is chunked over four ranks: 3, 3, 3 and 1.  Every rank has the whole input.

    forward    y_r  = x W_r^T        its rows of the output;  an all-gather makes the whole
    backward   dW_r = dy_r^T x       from its own part of dy: nothing to send
               dx   = Σ dy_r W_r     each rank has a share of the sum: an all-reduce

Part 1 writes that by hand.  Part 2 marks the weight of a stock ``nn.Linear`` as cut, and leaves forward and backward to
it.  Part 3 trains with it.  Each part asserts what it claims against one process.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.table.layout import part

RANKS, IN, OUT, ROWS = 4, 6, 10, 5
MESH, AXIS = f"tensor={RANKS}", ("tensor",)

torch.manual_seed(0)
LINEAR = nn.Linear(IN, OUT, dtype=torch.float64)
"""Ranks copy it; threads that seed the process's generator would disturb each other."""
X = torch.randn(ROWS, IN, dtype=torch.float64)
TARGET = torch.randn(ROWS, OUT, dtype=torch.float64)


def alone() -> dict[str, Tensor]:
    """What one process gets."""
    linear, x = copy.deepcopy(LINEAR), X.clone().requires_grad_()
    y = linear(x)
    (y - TARGET).square().sum().backward()
    assert x.grad is not None and linear.weight.grad is not None and linear.bias.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dW": linear.weight.grad, "db": linear.bias.grad}


def by_hand(comm: Comm) -> dict[str, Tensor]:
    """Forward and backward with one collective each; pieces that are shorter than the first travel padded."""
    start, stop = part(OUT, RANKS, comm.rank)
    step = part(OUT, RANKS, 0)[1]
    weight, bias = LINEAR.weight.detach()[start:stop], LINEAR.bias.detach()[start:stop]

    mine = F.linear(X, weight, bias)  # [5, 3] on ranks 0 to 2, [5, 1] on rank 3
    padded = F.pad(mine, (0, step - mine.size(1)))
    pieces = torch.empty(RANKS, ROWS, step, dtype=X.dtype)
    comm.all_gather(pieces, padded, AXIS).wait()
    y = pieces.movedim(0, 1).flatten(1)[:, :OUT]

    dy = 2 * (y - TARGET)  # every rank has all of it, and needs its columns
    dy_mine = dy[:, start:stop]
    dx = dy_mine @ weight
    comm.all_reduce(dx, AXIS).wait()
    return {"y": y, "dx": dx, "dW": dy_mine.T @ X, "db": dy_mine.sum(0)}


def code_unchanged(comm: Comm) -> dict[str, Tensor]:
    """The same layer, its weight marked as cut: autograd and the rules of sharded tensors do the rest."""
    linear = copy.deepcopy(LINEAR)
    plait.annotate(linear, {"weight": "out/tensor in", "bias": "out/tensor"}, comm)
    x = plait.ShardedTensor.from_full(X.clone().requires_grad_(), "rows in", comm)
    if comm.rank == 0:
        print(f"the layer itself {plait.explain(linear, x)}")

    mark = len(comm.ledger)
    y = linear(x)  # stock code, on pieces: nothing is sent
    assert y.sharding.dims == ((), ("tensor",)) and len(comm.ledger) == mark

    loss = (y - plait.ShardedTensor.from_full(TARGET, "rows out/tensor", comm)).square().sum()
    loss.backward()  # still nothing: the loss is a pending sum
    assert loss.sharding.pending == AXIS and len(comm.ledger) == mark

    found = {"y": y.full(), "dx": x.grad.full(), "dW": linear.weight.grad.full(), "db": linear.bias.grad.full()}
    if comm.rank == 0:
        print(f"to make y whole: {plait.explain(y, 'rows out')}")
        for name, gradient in (("dx", x.grad), ("dW", linear.weight.grad), ("db", linear.bias.grad)):
            print(f"{name} lies as {gradient.sharding.placements(comm.mesh)}")
        for entry in comm.ledger.since(mark):
            print(f"  sent for .full(): {entry.kind} over {', '.join(entry.axes)}, {entry.bytes} bytes")
    return found


def train(comm: Comm) -> float:
    """Ten steps of plain gradient descent on the pieces; the loss at the end."""
    linear = copy.deepcopy(LINEAR)
    plait.annotate(linear, {"weight": "out/tensor in", "bias": "out/tensor"}, comm)
    x = plait.ShardedTensor.from_full(X, "rows in", comm)
    target = plait.ShardedTensor.from_full(TARGET, "rows out/tensor", comm)
    for _ in range(10):
        loss = (linear(x) - target).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in linear.parameters():
                p -= 0.01 * p.grad  # piece by piece: value and gradient lie alike
                p.grad = None
    return float(loss.full())


def main() -> None:
    expected = alone()
    for name, body in (("by hand", by_hand), ("with the layer's code unchanged", code_unchanged)):
        for rank, found in enumerate(plait.run_threads(MESH, body)):
            start, stop = part(OUT, RANKS, rank) if body is by_hand else (0, OUT)
            for key, value in found.items():
                whole = expected[key][start:stop] if key in ("dW", "db") else expected[key]
                torch.testing.assert_close(value, whole, rtol=0, atol=1e-12)
        print(f"{name}: y, dx, dW and db are those of one process, on every rank")

    linear = copy.deepcopy(LINEAR)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        loss = (linear(X) - TARGET).square().sum()
        loss.backward()
        optimizer.step()
    losses = plait.run_threads(MESH, train)
    assert all(abs(found - loss.item()) < 1e-12 * loss.item() for found in losses)
    print(f"ten steps on the pieces: loss {losses[0]:.6f}, one process {loss.item():.6f}")


if __name__ == "__main__":
    main()
