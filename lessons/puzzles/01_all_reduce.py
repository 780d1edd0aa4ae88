"""Puzzle 1: an all-reduce from messages, within 2 (n - 1) / n of the array sent by each rank.

Fill in ``solve``: afterwards every rank has the sum of all ranks' ``x``, in place.  Use comm.send(tensor, rank) and
comm.recv(tensor, rank).wait() only.  The length of ``x`` is a multiple of the number of ranks.  Lesson 6 has the idea.

    plait lesson check 1
"""

import torch

import plait

RANKS, NUMEL = 4, 1000


def solve(comm: plait.Comm, x: torch.Tensor) -> None:
    raise NotImplementedError


def judge(solve) -> list[str]:
    def body(comm: plait.Comm) -> tuple[torch.Tensor, int, set[str]]:
        x = torch.arange(float(NUMEL)) * (comm.rank + 1)
        solve(comm, x)
        return x, comm.ledger.sent, {entry.kind for entry in comm.ledger}

    found = plait.run_threads(f"shard={RANKS}", body, deadline=5.0)
    expected, most = torch.arange(float(NUMEL)) * sum(range(1, RANKS + 1)), 2 * (RANKS - 1) * 4 * NUMEL // RANKS
    wrong = [int((x != expected).sum()) for x, _, _ in found]
    problems = [f"rank {r}: {n} of {NUMEL} elements are not the sum" for r, n in enumerate(wrong) if n]
    problems += [
        f"rank {r} sends {sent} bytes, {sent - most} too many" for r, (_, sent, _) in enumerate(found) if sent > most
    ]
    used = set().union(*(kinds for _, _, kinds in found)) - {"send", "recv"}
    return problems + [f"uses {kind}, which is what is to be built" for kind in sorted(used)]
