"""Lesson 13: the table of rows, and how to write your own.

The idea.  Data parallel, ZeRO 1 to 3, FSDP, hybrid sharding: they are one algorithm with different answers to one
question.  A step has four kinds of state.  Where is each of them?  A *cell* answers with the mesh axes that cut it,
and the axes over which a sum is still pending.  A *row* is four cells, and every message comes from the move from one
cell to the next, by four rules:

    pending(a)     -> full            all-reduce over a
    pending(a)     -> cut over a      reduce-scatter over a
    cut over a     -> full            all-gather over a
    full           -> cut over a      keep your slice; nothing is sent

    parameters -> full (forward) -> kept -> full (backward)
    full, pending -> gradients, for each microbatch;  gradients -> optimizer -> parameters, once a step

``shard/replica`` is one cut inside another: over ``shard``, and each piece once more over ``replica``.

Predict before you run it, on a mesh "replica=2 shard=2" (two groups of two):
  1. The row hsdp cuts parameters and gradients over ``shard`` only.  What crosses ``replica``, and how often?
  2. What is the name of the row ``full | full | shard/replica | shard/replica``?
  3. Is there a row that sends less than data parallel?

You need lesson 5 and lesson 12.  Pictures: docs/guide/pictures.md; bytes: docs/guide/prediction.md.

    plait lesson run 13
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import plait
from plait.table.cells import moves

MESH = "replica=2 shard=2"
RANKS, WHY = (2, 4, 8), "two groups cut samples and weights evenly"
WIDTH, SAMPLES, STEPS, MICROBATCHES = 32, 48, 3, 3
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2)))
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()

ROWS = {
    #         parameters        kept until backward  gradients                          optimizer state
    "ddp": "full            | full            | full, pending(shard, replica) | full",
    "zero1": "full            | full            | full, pending(shard, replica) | shard/replica",
    "zero2": "full            | full            | shard/replica                 | shard/replica",
    "zero3": "shard/replica   | shard/replica   | shard/replica                 | shard/replica",
    "zero3_keep": "shard/replica   | full            | shard/replica                 | shard/replica",
    "hsdp": "shard           | shard           | shard, pending(replica)       | shard",
    "psdp": "shard           | shard           | shard, pending(replica)       | shard/replica",
    "hpz": "shard/replica   | shard           | shard/replica                 | shard/replica",
}
tanh_backward = torch.ops.aten.tanh_backward  # gradient * (1 - y * y), as autograd computes it
Cell = tuple[tuple[str, ...], tuple[str, ...]]
"""The axes that cut it, outermost first, and those over which a sum is pending."""


# 1. A cell is text.


def read(text: str) -> Cell:
    place, _, rest = text.strip().partition(", pending(")
    split = () if place == "full" else tuple(place.split("/"))
    return split, tuple(rest.rstrip(")").replace(",", " ").split())


# 2. From cell to cell: the four rules.  Each gives a collective and its axis.


def path(start: Cell, end: Cell) -> list[tuple[str, tuple[str, ...]]]:
    (split, pending), (target, still) = start, end
    steps = [("reduce_scatter" if axis in pending else "slice", (axis,)) for axis in target[len(split) :]]
    if rest := tuple(axis for axis in pending if axis not in still and axis not in target):
        steps.append(("all_reduce", rest))
    return steps + [("all_gather", (axis,)) for axis in reversed(split[len(target) :])]


def convert(comm: plait.Comm, x: Tensor, start: Cell, end: Cell) -> Tensor:
    for kind, axes in path(start, end):  # @over
        n = comm.mesh.count(axes)  # @hide
        if kind == "all_reduce":  # @hide
            x = x.clone()
            comm.all_reduce(x, axes).wait()
        elif kind == "slice":  # @hide
            x = x.chunk(n)[comm.mesh.index(comm.rank, axes)]
        elif kind == "reduce_scatter":  # @hide
            piece = torch.empty(x.numel() // n)
            comm.reduce_scatter(piece, x, axes).wait()
            x = piece
        else:
            whole = torch.empty(x.numel() * n)
            comm.all_gather(whole, x, axes).wait()
            x = whole
    return x


# 3. Every row in one loop.  This is ZeRO, FSDP and the others; only speed is left out.


FULL: Cell = ((), ())
FRESH: Cell = ((), ("shard", "replica"))  # each rank's gradient of its own samples


def batches(comm: plait.Comm) -> list[tuple[Tensor, Tensor]]:
    place, n = comm.data_rank, comm.mesh.data_size
    return list(zip(X.chunk(n)[place].chunk(MICROBATCHES), Y.chunk(n)[place].chunk(MICROBATCHES), strict=True))


def body(comm: plait.Comm, row: str = ROWS["zero3"]) -> dict:
    at_rest, kept, grads, optim = (read(cell) for cell in row.split("|"))
    whole = torch.cat([p.detach().flatten() for p in MODEL.parameters()])
    params = convert(comm, whole, FULL, at_rest)  # @over
    piece = nn.Parameter(convert(comm, whole, FULL, optim).clone())  # @over
    optimizer = torch.optim.AdamW([piece], lr=1e-2)
    for _ in range(STEPS):
        mark, summed = len(comm.ledger), torch.zeros(())
        for x, y in batches(comm):
            full = convert(comm, params, at_rest, FULL)
            w1, w2 = (w.view(WIDTH, WIDTH) for w in full.chunk(2))
            h = torch.tanh(x @ w1.T)
            y_hat = torch.tanh(h @ w2.T)
            saved = convert(comm, full, FULL, kept)  # between forward and backward
            w2 = convert(comm, saved, kept, FULL).chunk(2)[1].view(WIDTH, WIDTH)
            dz2 = tanh_backward(2 * (y_hat - y), y_hat)
            dz1 = tanh_backward(dz2 @ w2, h)
            gradient = torch.cat([(dz1.T @ x).flatten(), (dz2.T @ h).flatten()])
            summed = summed + convert(comm, gradient, FRESH, grads)
        piece.grad = convert(comm, summed, grads, optim) * (1 / SAMPLES)
        optimizer.step()
        params = convert(comm, piece.detach(), optim, at_rest)
    sent = sum(entry.sent for entry in comm.ledger.since(mark))
    across = [entry for entry in comm.ledger.since(mark) if "replica" in entry.axes]
    return {"parameters": convert(comm, params, at_rest, FULL), "sent": sent, "across": len(across)}


def engine(comm: plait.Comm, row: str) -> Tensor:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = plait.Engine(model, comm, strategy=row, optimizer=optimizer)
    for _ in range(STEPS):
        for x, y in batches(comm):
            ours.backward((model(x) - y).square().sum(), count=len(x))
        optimizer.step()
    return torch.cat([t.flatten() for t in ours.full_state_dict().values()])


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    mesh = f"replica=2 shard={ranks // 2}"

    def run(call: Callable, row: str) -> list:
        return plait.run_threads(mesh, lambda comm: call(comm, row))

    volume, M, s, f = 4 * 2 * WIDTH**2, MICROBATCHES, ranks // 2, (ranks - 1) / ranks
    g, cross = (s - 1) / s, 1 / s  # a collective inside a group; a sum over replica of a group's piece
    planned = {  # volumes sent, messages that cross replica
        "ddp": (2 * f, 1),
        "zero1": (2 * f, 2),
        "zero2": ((M + 1) * f, M + 1),
        "zero3": (3 * M * f, 3 * M),
        "zero3_keep": (2 * M * f, 2 * M),
        "hsdp": (3 * M * g + cross, 1),
        "psdp": (3 * M * g + cross, 2),
        "hpz": (M * (2 * f + g), 2 * M),
    }
    sent = {}
    for name, row in ROWS.items():
        found, theirs = run(body, row), run(engine, name)
        assert all(torch.equal(a["parameters"], b) for a, b in zip(found, theirs, strict=True))
        sent[name] = found[0]["sent"] / volume
        print(f"{name:11} sends {sent[name]:5.2f} volumes a step, {found[0]['across']:2} messages cross replica")
        assert abs(sent[name] - planned[name][0]) < 1e-9 and found[0]["across"] == planned[name][1]
        # The row is plait's, cell for cell.  plait may make one message over both axes where ``convert`` makes two.
        theirs = plait.TABLE[name]
        assert [read(str(c)) for c in (theirs.params, theirs.kept, theirs.grads, theirs.optim)] == [
            read(cell) for cell in row.split("|")
        ]
    print("on every rank, each row gives the parameters of plait's engine under that row, to the bit")

    # Prediction 1: one gradient sum per step, for any number of microbatches.  plait's engine makes one per unit.
    assert [str(m) for m in moves(plait.TABLE["hsdp"]).step] == ["all_reduce(replica) inside shard"]
    # Prediction 2: ZeRO-2.
    assert plait.parse_strategy("mine: full | full | shard/replica | shard/replica").row() == plait.TABLE["zero2"].row()
    # Prediction 3: none.  A sum that all must see costs two volumes; rows trade bytes held for bytes sent.
    assert min(sent.values()) == sent["ddp"] == sent["zero1"]

    # Your own row: gather inside the group once per microbatch, spread the optimizer state over all ranks.
    mine = "shard | full | shard, pending(replica) | shard/replica"
    found, theirs = run(body, mine), run(engine, f"mine: {mine}")
    assert all(torch.equal(a["parameters"], b) for a, b in zip(found, theirs, strict=True))
    own = found[0]["sent"] / volume
    print(f"a row of our own sends {own:.2f} volumes; plait verify --strategy 'mine: ...' proves it")
    assert abs(own - (2 * M * g + cross)) < 1e-9


if __name__ == "__main__":
    main()
