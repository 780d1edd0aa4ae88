"""A solution of puzzle 4: each piece goes straight to the rank that needs it."""

import torch
from torch import Tensor

import plait


def solve(comm: plait.Comm, x: Tensor) -> Tensor:
    pieces = x.chunk(comm.world_size)
    for other in range(comm.world_size):
        if other != comm.rank:
            comm.send(pieces[other], other)
    total = torch.zeros_like(pieces[comm.rank])
    for other in range(comm.world_size):
        term = pieces[comm.rank]
        if other != comm.rank:
            term = torch.empty_like(total)
            comm.recv(term, other).wait()
        total = total + term
    return total
