"""A solution of puzzle 2: one flat buffer, which frameworks call a bucket."""

import torch

import plait


def solve(comm: plait.Comm, gradients: list[torch.Tensor]) -> None:
    flat = torch.cat([g.flatten() for g in gradients])
    comm.all_reduce(flat, ("shard",)).wait()
    for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(summed.view_as(g))
