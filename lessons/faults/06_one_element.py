"""Fault 6: one printed element as proof.

"The sharded model gives 0.3514, the reference gives 0.3514."  The last rank's piece was never gathered.  What would
have shown it?

    plait lesson find 6
"""

import torch
from torch import Tensor

import plait

torch.manual_seed(0)
W, X = torch.randn(10, 6), torch.randn(5, 6)


def body(comm: plait.Comm, fixed: bool) -> Tensor:
    """y = x W^T, the rows of W cut over the ranks: 3, 3, 3 and 1."""
    step = -(-len(W) // comm.world_size)
    mine = W[comm.rank * step : (comm.rank + 1) * step]
    rows = step if fixed else len(W) // comm.world_size  # with the fault: 10 // 4 rows of each rank
    padded = torch.zeros(rows, len(X))
    padded[: min(rows, len(mine))] = (X @ mine.T).T[:rows]
    whole = torch.empty(rows * comm.world_size, len(X))
    comm.all_gather(whole, padded, ("shard",)).wait()
    y = torch.zeros(len(W), len(X))
    y[: min(len(W), len(whole))] = whole[: len(W)]
    return y.T


def main() -> None:
    reference = X @ W.T
    wrong, right = (plait.run_threads("shard=4", lambda comm, f=f: body(comm, f))[0] for f in (False, True))
    print(f"one element: {wrong[0, 0]:.4f} and {reference[0, 0]:.4f}: the proof that was printed")
    off = [c for c in range(10) if not torch.allclose(wrong[:, c], reference[:, c], rtol=0, atol=1e-5)]
    print(f"verdict: compared whole, {len(off)} of 10 columns are wrong: {off}")
    assert abs(wrong[0, 0] - reference[0, 0]) < 1e-5 and off == list(range(2, 10))
    torch.testing.assert_close(right, reference, rtol=0, atol=1e-5)
    print("the fix: ceil(10 / 4) rows for each rank, padded; and torch.equal or assert_close on whole tensors")
