"""Lesson 6: ring and tree.

The idea.  Lesson 5 sent everything through rank 0, which became the bottleneck.  Two algorithms share the work.

The *ring*: cut the array in n chunks.  In each of n - 1 rounds every rank passes one chunk to the next rank and adds
its own numbers to the chunk that arrives.  Then each rank has one finished chunk (that was a reduce-scatter); n - 1
more rounds pass the finished chunks around (an all-gather).

The *tree*: in each round half of the remaining ranks send their sum to a partner and are done.  After log2(n)
rounds rank 0 has the sum; the same tree backwards brings it to all.

    ring      2 (n - 1) messages in a row, each of S / n bytes     good for long arrays
    tree      2 log2(n) messages in a row, each of S bytes         good for short ones

Predict before you run it:
  1. Four ranks, 4,000 bytes: how many bytes does a rank send in the ring?  And eight ranks?
  2. Both add the same four numbers.  Are the sums equal to the bit?
  3. A message costs 100 us plus a microsecond per KB.  Eight ranks: from which size on is the ring faster?

    plait lesson run 6
"""

import math
import time

import torch
from torch import Tensor

import plait

MESH = "shard=4"
RANKS, WHY = range(1, 17), "more than 16 threads take long"
AXIS = ("shard",)


# 1. The ring.  Member k's chunk k is finished after the first loop.


def ring_all_reduce(comm: plait.Comm, x: Tensor) -> None:
    n, me = comm.world_size, comm.rank
    chunks = list(x.tensor_split(n))

    def pass_on(going: int, coming: int) -> Tensor:
        arrived = torch.empty_like(chunks[coming % n])
        handle = comm.recv(arrived, (me - 1) % n)  # posted before we send: if all waited to send, none would receive
        comm.send(chunks[going % n], (me + 1) % n).wait()
        handle.wait()
        return arrived

    for turn in range(1, n):
        chunks[(me - turn - 1) % n] += pass_on(me - turn, me - turn - 1)
    for turn in range(n - 1):
        chunks[(me - turn - 1) % n].copy_(pass_on(me - turn, me - turn - 1))


# 2. The tree.  Rank v sends its sum to v without its lowest bit, and gets the result from that rank.


def tree_all_reduce(comm: plait.Comm, x: Tensor) -> None:
    n, me, arrived = comm.world_size, comm.rank, torch.empty_like(x)
    distance = 1
    while distance < n and not me & distance:
        if me + distance < n:
            comm.recv(arrived, me + distance).wait()
            x += arrived
        distance *= 2
    if me:
        comm.send(x, me - distance).wait()
        comm.recv(x, me - distance).wait()
    while distance > 1:
        distance //= 2
        if me + distance < n:
            comm.send(x, me + distance).wait()


# 3. Which is faster, and when?  A message of b bytes takes a + b / B seconds: latency a, bandwidth B.


def ring_seconds(n: int, size: float, a: float, B: float) -> float:
    return 2 * (n - 1) * (a + size / n / B)


def tree_seconds(n: int, size: float, a: float, B: float) -> float:
    return 2 * math.ceil(math.log2(n)) * (a + size / B)


def crossing(n: int, a: float, B: float) -> float:
    """The size at which both take the same time."""
    rounds = math.ceil(math.log2(n))
    return a * B * (n - 1 - rounds) / (rounds - (n - 1) / n)


def body(comm: plait.Comm) -> tuple[int, int]:
    """Runs both algorithms on numbers that add exactly; returns the bytes sent by each."""
    ours = torch.arange(1000.0) * (comm.rank + 1)
    ring, tree = ours.clone(), ours.clone()
    ring_all_reduce(comm, ring)
    by_ring = comm.ledger.sent
    tree_all_reduce(comm, tree)
    expected = torch.arange(1000.0) * sum(range(1, comm.world_size + 1))
    assert torch.equal(ring, expected) and torch.equal(tree, expected)
    return by_ring, comm.ledger.sent - by_ring


def rounding(comm: plait.Comm) -> list[Tensor]:
    x = torch.tensor([2.0**24, 1.0, 1.0, 1.0]).roll(comm.rank).repeat(4)
    found = [x.clone() for _ in range(3)]
    ring_all_reduce(comm, found[0])
    tree_all_reduce(comm, found[1])
    comm.all_reduce(found[2], AXIS).wait()
    return found


def seconds(comm: plait.Comm, numel: int) -> list[float]:
    times = []
    for algorithm in (ring_all_reduce, tree_all_reduce):
        x = torch.zeros(numel)
        algorithm(comm, x)  # warms up
        comm.barrier(AXIS)
        start = time.perf_counter()
        for _ in range(5):
            algorithm(comm, x)
        times.append((time.perf_counter() - start) / 5)
    return times


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    # Prediction 1: 6,000 and 7,000.  A ring sends 2 (n - 1) / n of the array per rank: never twice, however many ranks.
    for n in sorted({2, 3, 4, 8, ranks}):
        sent = plait.run_threads(f"shard={n}", body)
        chunk = [4 * len(c) for c in torch.arange(1000).tensor_split(n)]
        print(f"{n} ranks, 4,000 bytes: the ring sends {[r for r, _ in sent]}, the tree {[t for _, t in sent]}")
        assert sum(r for r, _ in sent) == 2 * (n - 1) * sum(chunk) == sum(t for _, t in sent)
        assert max(r for r, _ in sent) <= 2 * (n - 1) * max(chunk)

    # Prediction 2: no.  Every order of additions rounds differently.  All ranks of one algorithm agree, though.
    found = plait.run_threads("shard=4", rounding)
    for kind, (algorithm, name) in enumerate((("ring", "ring"), ("tree", "tree"), ("rank order", "comm.all_reduce"))):
        sums = [int(v) for v in found[0][kind][:4]]
        print(f"2^24 + 1 + 1 + 1, added by {algorithm:10}: {sums}  ({name})")
        assert all(torch.equal(rank[kind], found[0][kind]) for rank in found)
        assert all(abs(v - (2**24 + 3)) <= 3 for v in sums), "each is rounded"
    assert not torch.equal(found[0][0], found[0][1])
    print("plait adds in rank order by default, so that a run on four ranks can be repeated to the bit on one")

    # Prediction 3: from about 188 KB on.  This is derived from the two formulas, which a table of both confirms.
    a, B = 100e-6, 1e9
    size = crossing(8, a, B)
    print(f"derived, 8 ranks, 100 us and 1 GB/s: equal at {size / 1e3:.0f} KB")
    for each in (size / 10, size * 10):
        print(f"  derived, {each / 1e3:6.0f} KB: ring {1e3 * ring_seconds(8, each, a, B):5.2f} ms,", end=" ")
        print(f"tree {1e3 * tree_seconds(8, each, a, B):5.2f} ms")
    assert math.isclose(ring_seconds(8, size, a, B), tree_seconds(8, size, a, B))
    assert ring_seconds(8, size * 10, a, B) < tree_seconds(8, size * 10, a, B)
    assert ring_seconds(8, size / 10, a, B) > tree_seconds(8, size / 10, a, B)

    # The measurement.
    for numel in (10, 1_000_000):
        ring, tree = plait.run_threads(f"shard={ranks}", lambda comm, numel=numel: seconds(comm, numel))[0]
        print(f"measured here, {4 * numel:>9,} bytes: ring {1e3 * ring:6.2f} ms, tree {1e3 * tree:6.2f} ms")
    print("threads share memory and cores: here the tree can win at both sizes")


if __name__ == "__main__":
    main()
