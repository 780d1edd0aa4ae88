"""Fault 5: the bandwidth of a reduce-scatter, from the size of its output.

The number looks low next to the data sheet, and people buy another network.  Which size belongs in the formula?

    plait lesson find 5
"""

import torch

import plait
from plait.table.collectives import bus_factor

SECONDS = 0.01
"""Pretend that each collective takes this long: only the bytes are in question."""


def busbw(whole: torch.Tensor, out: torch.Tensor, ranks: int, fixed: bool) -> float:
    size = (whole if fixed else out).nbytes
    return size / SECONDS * bus_factor("reduce_scatter", ranks)


def body(comm: plait.Comm) -> tuple[float, float, float]:
    whole = torch.ones(4096)
    out = torch.empty(4096 // comm.world_size)
    comm.reduce_scatter(out, whole, ("shard",)).wait()
    rates = [busbw(whole, out, comm.world_size, fixed) for fixed in (False, True)]
    return rates[0], rates[1], comm.ledger.sent / SECONDS


def main() -> None:
    for ranks in (2, 4, 8):
        wrong, right, truth = plait.run_threads(f"shard={ranks}", body)[0]
        print(f"{ranks} ranks: with the fault {wrong:9.0f} B/s, fixed {right:9.0f}, sent by the ledger {truth:9.0f}")
        assert right == truth == ranks * wrong
    print("verdict: too low by the number of ranks; the bytes that a rank sent, over the time, are the truth")
    print("the fix: S is the whole array, the input of a reduce-scatter and the output of an all-gather")
