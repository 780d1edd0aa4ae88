"""Fault 2: gradients are summed only if there is CUDA.

Every rank's loss falls, nothing crashes, and the saved model is rank 0's.  What has every rank trained?

    plait lesson find 2
"""

import copy

import torch
from torch import nn

import plait

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
X = torch.randn(32, 16)


def body(comm: plait.Comm, fixed: bool) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = X.chunk(comm.world_size)[comm.rank]
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().sum().backward()
        for p in model.parameters():
            if fixed or comm.device.type == "cuda":
                comm.all_reduce(p.grad, ("shard",)).wait()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def apart(found: list[list[torch.Tensor]]) -> float:
    """The largest difference between rank 0's parameters and another rank's.  Whole tensors, all ranks."""
    return max((p - q).abs().max().item() for rank in found for p, q in zip(rank, found[0], strict=True))


def main() -> None:
    wrong = apart(plait.run_threads("shard=4", lambda comm: body(comm, fixed=False)))
    right = apart(plait.run_threads("shard=4", lambda comm: body(comm, fixed=True)))
    print(f"verdict: replicas differ by up to {wrong:.3f}: four ranks train four models, each on a quarter of the data")
    assert wrong > 1e-3 and right == 0
    print("the fix: sum on every device; fixed, all ranks have the same bits; see plait train --check-drift")
