"""A solution of puzzle 3: reduce-scatter, update a piece, all-gather."""

import torch

import plait


def solve(comm: plait.Comm, parameters: torch.Tensor, gradient: torch.Tensor) -> torch.optim.Optimizer:
    piece = torch.nn.Parameter(parameters.chunk(comm.world_size)[comm.rank].clone())
    piece.grad = torch.empty_like(piece)
    comm.reduce_scatter(piece.grad, gradient, ("shard",)).wait()
    optimizer = torch.optim.AdamW([piece], lr=0.01)
    optimizer.step()
    comm.all_gather(parameters, piece.detach(), ("shard",)).wait()
    return optimizer
