"""Lesson 16: sharded tensors and their specs.

The idea.  In lesson 15 we cut the matrices and knew, in our heads, the layout of each intermediate tensor.  Write it
down instead: a *sharded tensor* is a local piece and a *spec*, which says for each dim which axis of the mesh cuts it,
and over which axes a sum is still pending.  Now every operator can have a rule that computes the spec of its result,
and refuses operands that would need a message.  The model's code does not change at all:

    x  rows in             W  out/tensor in        x W^T  rows out/tensor         nothing is sent
    y  rows out/tensor     y.square().sum()        pending(tensor)                nothing is sent
    "rows out/tensor" -> "rows out"                 an all-gather, because the code asks for it

A value and its gradient mirror each other: a cut value has a cut gradient; a whole value has a pending one, because
each rank's gradient is its own share of a sum.

Predict before you run it: a Linear with 10 output features, its weight cut over four ranks:
  1. How many rows does each rank have?
  2. What does the backward send, before the program asks for a whole gradient?
  3. What is the spec of x's gradient?

    plait lesson run 16
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

MESH = "tensor=4"
RANKS, WHY = range(2, 6), "each has at least one of 10 rows"
AXIS = ("tensor",)
IN, OUT, ROWS, STEPS = 6, 10, 5, 10
torch.manual_seed(0)
LINEAR = nn.Linear(IN, OUT, dtype=torch.float64)
X = torch.randn(ROWS, IN, dtype=torch.float64)
TARGET = torch.randn(ROWS, OUT, dtype=torch.float64)


# 1. From nothing: a piece, its cut dim, and whether a sum is pending.  Then rules.


@dataclass
class Mini:
    """A piece of a tensor and its spec."""

    piece: Tensor
    cut: int | None
    pending: bool
    comm: plait.Comm

    @classmethod
    def of(cls, whole: Tensor, cut: int | None, comm: plait.Comm) -> "Mini":
        piece = whole if cut is None else [*whole.chunk(comm.world_size, cut), whole.narrow(cut, 0, 0)][comm.rank]
        return cls(piece, cut, False, comm)

    def full(self, size: int = 0) -> Tensor:
        """The whole: the only place that communicates.  Uneven pieces travel padded to the first one's size."""
        if self.pending:
            total = self.piece.clone()
            self.comm.all_reduce(total, AXIS).wait()
            return total
        if self.cut is None:
            return self.piece
        n, across = self.comm.world_size, self.piece.movedim(self.cut, 0)
        step = -(-size // n)
        padded = torch.zeros(step, *across.shape[1:], dtype=across.dtype)
        padded[: len(across)] = across
        pieces = padded.new_empty(n * step, *across.shape[1:])
        self.comm.all_gather(pieces, padded, AXIS).wait()
        return pieces[:size].movedim(0, self.cut)


def linear(x: Mini, w: Mini) -> Mini:
    """The rule of a product: (rows in) x (out/tensor in) -> rows out/tensor.  Anything else would communicate."""
    if x.cut is not None or x.pending or w.cut != 0:
        raise ValueError(f"linear of x cut in {x.cut}, pending {x.pending}, and a weight cut in {w.cut}: gather first")
    return Mini(x.piece @ w.piece.T, 1, False, x.comm)


def by_rules(comm: plait.Comm) -> dict[str, Tensor]:
    """Forward and backward of one linear layer.  Each line is one rule; the backward's rules mirror the forward's."""
    x, w, target = Mini.of(X, None, comm), Mini.of(LINEAR.weight.detach(), 0, comm), Mini.of(TARGET, 1, comm)
    bias = Mini.of(LINEAR.bias.detach(), 0, comm)
    y = linear(x, w)
    y.piece = y.piece + bias.piece
    dy = Mini(2 * (y.piece - target.piece), 1, False, comm)
    dw = Mini(dy.piece.T @ x.piece, 0, False, comm)  # cut as W is
    dx = Mini(dy.piece @ w.piece, None, True, comm)  # x is whole, so its gradient is pending
    assert len(comm.ledger) == 0
    try:
        linear(y, w)
        raise AssertionError("a product of two cut tensors would need a message")
    except ValueError as error:
        assert "gather first" in str(error)
    return {"rows": len(w.piece), "y": y.full(OUT), "dx": dx.full(), "dW": dw.full(OUT)}


# 2. The same by plait: a stock nn.Linear, its code unchanged, its weight marked as cut.


def body(comm: plait.Comm) -> dict[str, Tensor]:
    linear = copy.deepcopy(LINEAR)
    plait.annotate(linear, {"weight": "out/tensor in", "bias": "out/tensor"}, comm)
    x = plait.ShardedTensor.from_full(X.clone().requires_grad_(), "rows in", comm)
    target = plait.ShardedTensor.from_full(TARGET, "rows out/tensor", comm)
    y = linear(x)
    loss = (y - target).square().sum()
    loss.backward()
    assert loss.sharding.pending == AXIS and len(comm.ledger) == 0
    said = {
        "gather": str(plait.explain(y, "rows out")),
        "dx": str(x.grad.sharding),
        "dW": str(linear.weight.grad.sharding),
    }
    found = {"y": y.full(), "dx": x.grad.full(), "dW": linear.weight.grad.full(), "db": linear.bias.grad.full()}
    return found | {"said": said, "messages": [(e.kind, e.bytes) for e in comm.ledger]}


def train(comm: plait.Comm) -> float:
    """Gradient descent on pieces: value and gradient have one spec, so the update sends nothing."""
    linear = copy.deepcopy(LINEAR)
    plait.annotate(linear, {"weight": "out/tensor in", "bias": "out/tensor"}, comm)
    x = plait.ShardedTensor.from_full(X, "rows in", comm)
    target = plait.ShardedTensor.from_full(TARGET, "rows out/tensor", comm)
    for _ in range(STEPS):
        loss = (linear(x) - target).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in linear.parameters():
                p -= 0.01 * p.grad
                p.grad = None
    return float(loss.full())


def main(ranks: int = 4) -> None:
    linear, x = copy.deepcopy(LINEAR), X.clone().requires_grad_()
    y = F.linear(x, linear.weight, linear.bias)
    (y - TARGET).square().sum().backward()
    expected = {"y": y.detach(), "dx": x.grad, "dW": linear.weight.grad, "db": linear.bias.grad}

    # Prediction 1: ceil(10 / 4) = 3 each, while rows remain: 3, 3, 3, 1.
    by_hand, found = plait.run_threads(f"tensor={ranks}", by_rules), plait.run_threads(f"tensor={ranks}", body)
    print("rows of the weight, rank by rank:", [rank["rows"] for rank in by_hand])
    assert ranks != 4 or [rank["rows"] for rank in by_hand] == [3, 3, 3, 1]

    for name, results in (("rules by hand", by_hand), ("nn.Linear with a cut weight", found)):
        for rank in results:
            for key in expected.keys() & rank.keys():
                torch.testing.assert_close(rank[key], expected[key], rtol=0, atol=1e-12)
        print(f"{name}: y, dx and dW equal one process's, on every rank, within 1e-12")

    # Prediction 2: nothing.  The ledger was empty after the backward; these are the calls of .full().
    said = found[0]["said"]
    print("the layer itself and its backward send nothing; the ledger is empty until values are gathered")
    print("to make y whole:", said["gather"])
    size = 8 * ROWS * ranks * -(-OUT // ranks)  # uneven pieces are padded
    assert f"{size} bytes, this rank sends {size - size // ranks} " in said["gather"]
    print("sent for .full():", found[0]["messages"])
    if ranks > 1:
        assert [kind for kind, _ in found[0]["messages"]] == ["all_gather", "all_reduce", "all_gather", "all_gather"]

    # Prediction 3: whole, with a sum pending over tensor.
    print("x is whole, so its gradient is", said["dx"], "; W is cut, so its gradient is", said["dW"])
    assert ranks == 1 or ("pending(tensor)" in said["dx"] and "pending" not in said["dW"])

    linear = copy.deepcopy(LINEAR)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (linear(X) - TARGET).square().sum()
        loss.backward()
        optimizer.step()
    losses = plait.run_threads(f"tensor={ranks}", train)
    print(f"{STEPS} steps on pieces: loss {losses[0]:.9f}, in one process {loss.item():.9f}")
    assert all(abs(value - loss.item()) < 1e-12 * loss.item() for value in losses)


if __name__ == "__main__":
    main()
