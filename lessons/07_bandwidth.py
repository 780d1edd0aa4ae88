"""Lesson 7: bandwidth, and the hierarchy of hardware.

The idea.  "How fast is the network?" has two answers.  *algbw* is the program's view: the size of the whole array
divided by the time.  *busbw* is the link's view: the bytes that each rank had to send, divided by the time.  Only
busbw can be compared with a data sheet, and between collectives and numbers of ranks:

    all-reduce                                    busbw = algbw * 2 (n - 1) / n
    reduce-scatter, all-gather, scatter, gather   busbw = algbw * (n - 1) / n
    broadcast, reduce                             busbw = algbw             (definitions of nccl-tests)

And links are not equal.  NVLink inside a host is nine times as fast as a port between hosts (derived from the rates
below), so a good all-reduce crosses hosts with as few bytes as it can.  Each way (the data sheet gives both ways of a
link together):

    reported, NVIDIA's data sheet of the H100 SXM     memory 3,350 GB/s    NVLink 450 GB/s    PCIe 5 64 GB/s
    reported, ConnectX-7                              one 400 Gb/s port    50 GB/s

Predict before you run it:
  1. Reduce-scatter, 4 ranks, 64 MB in all, 16 MB out per rank, 0.1 s.  What is algbw?  And busbw?
  2. A report divides the *output's* size by the time.  How wrong is that?
  3. Two hosts with two ranks each, an all-reduce of S bytes.  How many bytes must a rank send to the other host?

    plait lesson run 7
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import plait

MESH = "replica=2 shard=2"
"""Two hosts (``replica``) with two ranks each (``shard``)."""
RANKS, WHY = (2, 4, 8), "two hosts share 1,024 numbers evenly"
BOTH, HOST, ACROSS = ("replica", "shard"), ("shard",), ("replica",)
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def bus_factor(kind: str, ranks: int) -> float:
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("reduce_scatter", "all_gather", "scatter", "gather") else 1.0


# 1. How to time a collective: warm up, line up at a barrier, take the slowest rank, then the median of many.


def median_seconds(comm: plait.Comm, work: Callable[[], None], repeat: int = 9) -> float:
    work()
    times = torch.zeros(repeat, dtype=torch.float64)
    for i in range(repeat):
        comm.barrier(BOTH)
        start = time.perf_counter()
        work()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()  # on a GPU a call returns before its work is done
        times[i] = time.perf_counter() - start
    comm.all_reduce(times, BOTH, "max").wait()
    return statistics.median(times.tolist())


def measure(comm: plait.Comm, kind: str, numel: int) -> tuple[float, int]:
    """Seconds of one collective on an array of ``numel`` floats, and the bytes that this rank sends in it."""
    whole, piece = torch.ones(numel), torch.ones(numel // comm.world_size)
    calls: dict[str, Callable] = {
        "all_reduce": lambda: comm.all_reduce(whole.zero_(), BOTH).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(piece, whole, BOTH).wait(),
        "all_gather": lambda: comm.all_gather(whole, piece, BOTH).wait(),
        "broadcast": lambda: comm.broadcast(whole, BOTH, src=0).wait(),
    }
    before = comm.ledger.sent
    calls[kind]()
    sent = comm.ledger.sent - before
    return median_seconds(comm, calls[kind]), sent


# 2. The hierarchy: add inside the host, cross with one piece, spread inside the host.


def by_host(comm: plait.Comm, x: Tensor) -> None:
    piece = torch.empty(x.numel() // comm.mesh.count(HOST))
    comm.reduce_scatter(piece, x, HOST).wait()
    comm.all_reduce(piece, ACROSS).wait()
    comm.all_gather(x, piece, HOST).wait()


def body(comm: plait.Comm) -> tuple[bool, int, int]:
    x = torch.arange(1024.0) * (comm.rank + 1)
    flat, hosts = x.clone(), x.clone()
    comm.all_reduce(flat, BOTH).wait()
    in_one = comm.ledger.sent
    by_host(comm, hosts)
    across = sum(entry.sent for entry in comm.ledger if entry.axes == ACROSS)
    return torch.equal(flat, hosts), in_one, across


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    mesh = f"replica=2 shard={ranks // 2}"

    # Prediction 1: 640 MB/s, and 480 MB/s: three quarters of the array left each rank.
    algbw = 64e6 / 0.1
    busbw = algbw * bus_factor("reduce_scatter", 4)
    print(f"derived, 64 MB in 0.1 s: algbw {algbw / 1e6:.0f} MB/s, busbw {busbw / 1e6:.0f} MB/s")
    assert round(busbw) == 480_000_000 == 3 / 4 * algbw

    # Prediction 2: four times too low.  The output is one piece of four.
    wrong = 16e6 / 0.1
    print(
        f"find the fault: bytes from the output's size, derived {wrong / 1e6:.0f} MB/s: {algbw / wrong:g} times too low"
    )
    assert algbw / wrong == 4

    # The factors are not conventions to learn by heart: they are the ledger's bytes sent over the whole size.
    numel = 64 * ranks * 1024
    for kind in KINDS:
        found = plait.run_threads(mesh, lambda comm, kind=kind: measure(comm, kind, numel))
        seconds = found[0][0]
        size = 4 * numel
        rates = (
            f"algbw {size / seconds / 1e9:6.2f} GB/s, busbw {size / seconds * bus_factor(kind, ranks) / 1e9:6.2f} GB/s"
        )
        print(f"measured here, {kind:14} of {size:,} bytes: {rates}")
        if kind != "broadcast":
            assert all(s == size * bus_factor(kind, ranks) for _, s in found), "busbw is bytes sent over time"

    # Prediction 3: S / 2.  A flat all-reduce sends every rank's share everywhere; by host, only a piece crosses.
    found = plait.run_threads(mesh, body)
    equal, flat, across = found[0]
    print(
        f"an all-reduce of 4,096 bytes sends {flat} per rank; by way of the hosts {across} of them cross between hosts"
    )
    assert all(rank == found[0] for rank in found) and equal and across == 4096 // (ranks // 2)
    print("both give the same sums; plait goes host by host if the mesh says which axis crosses hosts")
    print("plait bench comm measures all of this on your links; plait doctor shows your hardware")


if __name__ == "__main__":
    main()
