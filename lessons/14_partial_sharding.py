"""Lesson 14: partially sharded data parallel, with microbatches.

The idea.  A mesh has three axes here: ``replica`` (slow links), ``shard`` (the data ranks of one replica, fast links)
and ``tensor`` (ranks that share one matrix product).  Three things are spread over it, and each has its own mapping:

    computation        samples over replica and shard, each matrix over tensor
    parameters         over tensor and shard: each replica has all of them once
    optimizer state    over tensor, shard and replica: only the update reads it, once a step, so spread it widest
                       (and with it a second copy of the parameters, which the update writes)

Ranks that differ only in ``tensor`` see the same samples.  Each multiplies with its half of each matrix, and one
all-reduce over ``tensor`` adds their terms of the result; lesson 15 explains this.

With microbatches the gradient needs care.  Each replica sums it in a buffer, cut like its parameters, and replicas
exchange nothing meanwhile.  At the end of the step one reduce-scatter over ``replica`` adds these buffers and leaves
each rank the piece that its optimizer updates.  After the update one all-gather over ``replica`` brings the parameters
back.  (plait's engine does both for each unit; this model is one unit.)  Replicas are on different hosts, so
``replica`` is the axis of the slow links.

Predict before you run it, with two replicas, two data ranks each, two tensor ranks:
  1. Four microbatches instead of one: how many more messages cross ``replica`` in a step?
  2. Which share of the parameters does a rank hold?  Of the optimizer's state?
  3. Does the gradient depend on the number of microbatches?

You need lesson 12 and lesson 13.  Skip ``gradient`` here, or read it for one tensor rank, where it is a plain forward
and backward.  More: docs/guide/planning.md.

    plait lesson run 14
"""

import copy

import torch
from torch import Tensor, nn

import plait

MESH = "replica=2 shard=2 tensor=2"
RANKS, WHY = (4, 8), "two replicas with two tensor ranks cut samples evenly"
WIDTH, HIDDEN, SAMPLES, LR = 8, 16, 32, 2.0**-12
torch.manual_seed(0)
# Small whole numbers: fp64 adds and multiplies them exactly, so every order of additions gives the same bits.
W1 = torch.randint(-2, 3, (HIDDEN, WIDTH)).double()
W2 = torch.randint(-2, 3, (WIDTH, HIDDEN)).double()
X = torch.randint(-2, 3, (SAMPLES, WIDTH)).double()
Y = X.flip(1)


def one_process() -> Tensor:
    """The gradient of the loss, summed over all samples."""
    w1, w2 = W1.clone().requires_grad_(), W2.clone().requires_grad_()
    (torch.relu(X @ w1.T) @ w2.T - Y).square().sum().backward()
    return torch.cat([w1.grad.flatten(), w2.grad.flatten()])


# 1. The collectives of a mapping, each over one axis.


def gather(comm: plait.Comm, piece: Tensor, axis: str) -> Tensor:
    whole = piece.new_empty(piece.numel() * comm.mesh.axis(axis))
    comm.all_gather(whole, piece.contiguous(), (axis,)).wait()
    return whole


def reduce_scatter(comm: plait.Comm, whole: Tensor, axis: str) -> Tensor:
    piece = whole.new_empty(whole.numel() // comm.mesh.axis(axis))
    comm.reduce_scatter(piece, whole, (axis,)).wait()
    return piece


def mine(comm: plait.Comm, whole: Tensor, axis: str, dim: int = 0) -> Tensor:
    return whole.chunk(comm.mesh.axis(axis), dim)[comm.mesh.index(comm.rank, (axis,))]


# 2. One step.  Each line that sends names its axis.


def gradient(comm: plait.Comm, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Forward and backward of one microbatch with this rank's half of each matrix; lesson 15 explains the cut."""
    rows = HIDDEN // comm.mesh.tensor
    w1, w2 = flat[: rows * WIDTH].view(rows, WIDTH), flat[rows * WIDTH :].view(WIDTH, rows)
    z = x @ w1.T
    out = torch.relu(z) @ w2.T
    comm.all_reduce(out, ("tensor",)).wait()
    dout = 2 * (out - y)
    dz = (dout @ w2) * (z > 0)
    return torch.cat([(dz.T @ x).flatten(), (dout.T @ torch.relu(z)).flatten()])


def body(comm: plait.Comm, microbatches: int = 4) -> dict:
    flat = torch.cat([mine(comm, W1, "tensor").flatten(), mine(comm, W2, "tensor", dim=1).flatten()])
    parameters = mine(comm, flat, "shard")
    piece = nn.Parameter(mine(comm, parameters, "replica").clone())
    optimizer = torch.optim.SGD([piece], lr=LR, momentum=0.5)
    place, n = comm.data_rank, comm.mesh.data_size
    x, y = X.chunk(n)[place], Y.chunk(n)[place]

    buffer = torch.zeros_like(parameters)  # this replica's sum
    for x_m, y_m in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        whole = gather(comm, parameters, "shard")
        buffer += reduce_scatter(comm, gradient(comm, whole, x_m, y_m), "shard")
    piece.grad = reduce_scatter(comm, buffer, "replica")  # once
    optimizer.step()
    parameters = gather(comm, piece.detach(), "replica")  # once

    axes = ("replica", "shard", "tensor")
    sent = {axis: sum(e.axes == (axis,) for e in comm.ledger) for axis in axes}
    volume = {axis: sum(e.sent for e in comm.ledger if e.axes == (axis,)) for axis in axes}
    whole = gather(comm, gather(comm, piece.grad, "replica"), "shard")
    after = gather(comm, parameters, "shard")
    state = optimizer.state[piece]["momentum_buffer"]
    held = {"parameters": parameters.numel(), "buffer": buffer.numel(), "optimizer": state.numel()}
    return {"gradient": whole, "after": after, "sent": sent, "volume": volume, "held": held}


def together(found: list[dict], key: str) -> Tensor:
    """Both matrices from the flat halves of the tensor ranks, which are ranks 0 and 1."""
    halves = [rank[key] for rank in found[:2]]
    rows = HIDDEN // 2
    w1 = torch.cat([half[: rows * WIDTH].view(rows, WIDTH) for half in halves])
    w2 = torch.cat([half[rows * WIDTH :].view(WIDTH, rows) for half in halves], dim=1)
    return torch.cat([w1.flatten(), w2.flatten()])


# 3. The same in plait: the row psdp, and a plan that says how each layer is cut.


def engine(comm: plait.Comm, model: nn.Module, microbatches: int = 4) -> Tensor:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * SAMPLES, momentum=0.5)  # the engine divides by the samples
    plan = {"0": "column", "2": "row"}
    ours = plait.Engine(model, comm, strategy="psdp", tensor_plan=plan, optimizer=optimizer)
    place, n = comm.data_rank, comm.mesh.data_size
    for x, y in zip(X.chunk(n)[place].chunk(microbatches), Y.chunk(n)[place].chunk(microbatches), strict=True):
        ours.backward((model(x) - y).square().sum(), count=len(x))
    optimizer.step()
    return torch.cat([t.flatten() for t in ours.full_state_dict().values()])


def main(ranks: int = 8) -> None:
    torch.set_num_threads(1)
    mesh, data = f"replica=2 shard={ranks // 4} tensor=2", ranks // 4
    expected = one_process()

    # Prediction 1: none.  One reduction and one gather cross replica, with any number of microbatches.
    for microbatches in (1, 2, 4):
        found = plait.run_threads(mesh, lambda comm, m=microbatches: body(comm, m))
        print(f"microbatches {microbatches}: messages of a rank by axis {found[0]['sent']}")
        assert all(r["sent"]["replica"] == 2 and r["sent"]["tensor"] == microbatches for r in found)
        assert all(r["sent"]["shard"] == 2 * microbatches * (data > 1) for r in found)
        held, volume = 8 * len(expected) // (2 * data), found[0]["volume"]  # bytes of a rank's parameters
        print(f"    bytes sent: {volume}; as many over replica with any number of microbatches")
        across = {"replica": held, "shard": 2 * microbatches * (data - 1) * held, "tensor": 8 * X.numel() // (2 * data)}
        assert volume == across
        # Prediction 3: no.  It is one sum of the same terms, and these numbers add exactly: equal to the bit.
        assert torch.equal(together(found, "gradient"), expected)
        assert all(torch.equal(r["gradient"], found[i % 2]["gradient"]) for i, r in enumerate(found))
    print("for each of them the gradient is that of one process, to the bit, on every rank")

    # Prediction 2: a quarter, since each replica has all; an eighth, since it is spread over everything.
    size = len(expected)
    shares = {kind: f"1/{size // n}" for kind, n in found[0]["held"].items()}
    print(f"held by a rank of {ranks}, of {size} numbers: {shares}")
    assert found[0]["held"]["parameters"] == size // (2 * data) and found[0]["held"]["optimizer"] == size // ranks

    layers = nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[0].weight.copy_(W1)
        model[2].weight.copy_(W2)
    after = together(found, "after")
    for state in plait.run_threads(mesh, lambda comm: engine(comm, model)):
        torch.testing.assert_close(state, after, rtol=0, atol=1e-12)
    print(f"plait's row psdp on {mesh!r}: the same parameters after the step, within 1e-12")


if __name__ == "__main__":
    main()
