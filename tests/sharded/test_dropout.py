"""A dropout mask that no layout changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tensor_cases import shard, values
from torch import nn

from plait import run_threads
from plait.comm import Comm
from plait.sharded import ShardedTensor, dropout_stream


def dropped(comm: Comm, layout: str, p: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    x = shard(values((5, 6)), layout, comm)
    with dropout_stream("seed", 3):
        first, second = F.dropout(x, p), nn.Dropout(p)(x)
    assert first.sharding == x.sharding and not comm.ledger.entries
    first.backward(torch.ones(5, 6).double())
    assert x.grad is not None
    return torch.stack([first.full(), second.full()]), x.grad.full()


def test_no_layout_and_no_mesh_changes_the_mask() -> None:
    ((want, gradient),) = run_threads("tensor=1", lambda comm: dropped(comm, "a b"))
    kept = want[0] != 0
    assert 0 < kept.sum() < 30 and not torch.equal(kept, want[1] != 0), "every call has its own mask"
    torch.testing.assert_close(want[0][kept], 2 * values((5, 6)).detach()[kept])
    for mesh, layout in (
        ("tensor=4", "a/tensor b"),
        ("tensor=4", "a b/tensor"),
        ("replica=2 tensor=2", "a/tensor/replica b"),
        ("replica=2 tensor=2", "a/tensor b, pending(replica)"),
    ):
        for out, grad in run_threads(mesh, lambda comm, layout=layout: dropped(comm, layout)):
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(grad, gradient)


def test_the_share_that_is_kept() -> None:
    def body(comm: Comm) -> None:
        x = ShardedTensor.from_full(torch.ones(200, 100), "a/tensor b", comm)
        for p in (0.1, 0.7):
            with dropout_stream(1):
                y = F.dropout(x, p).full()
            assert float((y != 0).float().mean()) == pytest.approx(1 - p, abs=0.01)
            assert float(y.mean()) == pytest.approx(1, abs=0.05)
        with dropout_stream(1):
            assert not F.dropout(x, 1.0).full().any()
            assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, training=False) is x

    run_threads("tensor=2", body)
