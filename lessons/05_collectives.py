"""Lesson 5: the collectives.

The idea.  Ranks rarely send single messages.  They do one of a few things together, and each has a name:

    broadcast       one has it         -> all have it
    scatter         one has it         -> each has a piece
    gather          each has a piece   -> one has all pieces, end to end
    all-gather      each has a piece   -> all have all pieces
    reduce          each has a term    -> one has the sum
    all-reduce      each has a term    -> all have the sum
    reduce-scatter  each has a term    -> each has a piece of the sum

Sum is the usual operation; min and max exist too.  There is no "mean": divide once, yourself, by a count that you know.

Predict before you run it, with four ranks; rank r has the four numbers 10 r + 0, 10 r + 1, 10 r + 2, 10 r + 3:
  1. What does rank 2 hold after a reduce-scatter?
  2. After an all-gather of each rank's first number?
  3. Which two collectives, one after the other, are an all-reduce?

    plait lesson run 5
"""

from collections.abc import Callable

import torch
from torch import Tensor

import plait

MESH = "shard=4"
RANKS, WHY = range(1, 17), "more than 16 threads take long"
AXIS = ("shard",)


# 1. From send and receive.  Everything goes through rank 0: easy to read, and slow.  Lesson 6 does better.


def broadcast(comm: plait.Comm, x: Tensor) -> Tensor:
    if comm.rank == 0:
        for other in range(1, comm.world_size):
            comm.send(x, other)
        return x
    got = torch.empty_like(x)
    comm.recv(got, 0).wait()
    return got


def scatter(comm: plait.Comm, x: Tensor) -> Tensor:
    pieces = list(x.chunk(comm.world_size))
    if comm.rank == 0:
        for other in range(1, comm.world_size):
            comm.send(pieces[other], other)
        return pieces[0].clone()
    got = torch.empty_like(pieces[0])
    comm.recv(got, 0).wait()
    return got


def gather(comm: plait.Comm, piece: Tensor) -> Tensor | None:
    if comm.rank > 0:
        comm.send(piece, 0)
        return None
    pieces = [piece, *(torch.empty_like(piece) for _ in range(1, comm.world_size))]
    for other in range(1, comm.world_size):
        comm.recv(pieces[other], other).wait()
    return torch.cat(pieces)


def reduce(comm: plait.Comm, x: Tensor, op: Callable = torch.add) -> Tensor | None:
    everything = gather(comm, x)
    if everything is None:
        return None
    total, *others = everything.chunk(comm.world_size)
    for other in others:
        total = op(total, other)  # in rank order, so the bits do not depend on speed
    return total


def all_gather(comm: plait.Comm, piece: Tensor) -> Tensor:
    whole = gather(comm, piece)
    return broadcast(comm, piece.repeat(comm.world_size) if whole is None else whole)


def all_reduce(comm: plait.Comm, x: Tensor, op: Callable = torch.add) -> Tensor:
    total = reduce(comm, x, op)
    return broadcast(comm, x if total is None else total)


def reduce_scatter(comm: plait.Comm, x: Tensor, op: Callable = torch.add) -> Tensor:
    total = reduce(comm, x, op)
    return scatter(comm, x if total is None else total)


# 2. All of them on one rank's numbers.


def body(comm: plait.Comm) -> dict[str, Tensor | None]:
    x = 10.0 * comm.rank + torch.arange(float(comm.world_size))
    first = x[:1].clone()
    return {
        "before": x,
        "broadcast": broadcast(comm, x),
        "scatter": scatter(comm, x),
        "gather": gather(comm, first),
        "all_gather": all_gather(comm, first),
        "reduce": reduce(comm, x),
        "all_reduce": all_reduce(comm, x),
        "reduce_scatter": reduce_scatter(comm, x),
    }


# 3. The same by plait: each is one call on a buffer.  ``wait`` returns when the buffer may be read.


def library(comm: plait.Comm) -> dict[str, Tensor | None]:
    n, x = comm.world_size, 10.0 * comm.rank + torch.arange(float(comm.world_size))
    first, root = x[:1].clone(), comm.rank == 0
    found = {"before": x, "broadcast": x.clone(), "reduce": x.clone(), "all_reduce": x.clone()}
    found |= {"scatter": torch.empty(1), "reduce_scatter": torch.empty(1), "all_gather": torch.empty(n)}
    found["gather"] = torch.empty(n) if root else None
    comm.broadcast(found["broadcast"], AXIS, src=0).wait()
    comm.scatter(found["scatter"], x if root else None, AXIS, src=0).wait()
    comm.gather(found["gather"], first, AXIS, dst=0).wait()
    comm.all_gather(found["all_gather"], first, AXIS).wait()
    comm.reduce(found["reduce"], AXIS, dst=0).wait()
    comm.all_reduce(found["all_reduce"], AXIS).wait()
    comm.reduce_scatter(found["reduce_scatter"], x, AXIS).wait()
    found["reduce"] = found["reduce"] if root else None
    return found


def halves(comm: plait.Comm) -> bool:
    """all-reduce = reduce-scatter, then all-gather; on numbers that round, to the bit.  For sum, min and max."""
    x = torch.tensor([1.0, 1e8, -1e8, 1e-3]).repeat(comm.world_size).roll(comm.rank)
    equal = []
    for op, by_hand in (("sum", torch.add), ("min", torch.minimum), ("max", torch.maximum)):
        one, piece, two = x.clone(), torch.empty(4), torch.empty_like(x)
        comm.all_reduce(one, AXIS, op).wait()
        comm.reduce_scatter(piece, x, AXIS, op).wait()
        comm.all_gather(two, piece, AXIS).wait()
        equal.append(torch.equal(one, two) and torch.equal(one, all_reduce(comm, x, by_hand)))
    return all(equal)


def draw(found: list[dict[str, Tensor | None]], kind: str) -> None:
    cells = [" ".join(f"{v:3.0f}" for v in f[kind]) if f[kind] is not None else "." for f in found]
    print(f"{kind:15}" + " | ".join(cell.ljust(4 * len(found) - 1) for cell in cells))


def main(ranks: int = 4) -> None:
    by_hand, ours = plait.run_threads(f"shard={ranks}", body), plait.run_threads(f"shard={ranks}", library)
    print(" " * 15 + " | ".join(f"rank {r}".ljust(4 * ranks - 1) for r in range(ranks)))
    for kind in by_hand[0]:
        draw(by_hand, kind)
        for mine, theirs in zip(by_hand, ours, strict=True):
            both = (mine[kind], theirs[kind])
            assert both == (None, None) or torch.equal(*both), kind
    print("plait's own calls give the same, on every rank")

    # Prediction 1: the sum over ranks of the number in place r, which is 10 (0 + 1 + 2 + 3) + 4 r.
    tens = 10 * sum(range(ranks))
    assert [f["reduce_scatter"].tolist() for f in by_hand] == [[tens + ranks * r] for r in range(ranks)]
    # Prediction 2: 0, 10, 20, 30 on every rank.
    assert all(f["all_gather"].tolist() == [10.0 * r for r in range(ranks)] for f in by_hand)
    # Prediction 3: reduce-scatter, then all-gather.  ZeRO is this sentence, with the optimizer's step in between.
    assert all(plait.run_threads(f"shard={ranks}", halves))
    print("all-reduce = reduce-scatter + all-gather: equal to the bit, for sum, min and max")

    # The measurement: through rank 0, one rank sends everything; the ledger shows the cost of each rank.
    def sent_by(call: Callable[[plait.Comm], object]) -> list[int]:
        return plait.run_threads(f"shard={ranks}", lambda comm: (call(comm), comm.ledger.sent)[1])

    sent = sent_by(lambda comm: all_reduce(comm, torch.ones(1000)))
    share = sent_by(lambda comm: comm.all_reduce(torch.ones(1000), AXIS).wait())
    print(f"an all-reduce of 4,000 bytes by hand sends {sent} bytes per rank; evenly shared it is {share[0]} each")
    assert sent == [(ranks - 1) * 4000] + [4000] * (ranks - 1) and share == [2 * (ranks - 1) * 4000 // ranks] * ranks


if __name__ == "__main__":
    main()
