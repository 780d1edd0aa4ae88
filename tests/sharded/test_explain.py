"""Messages are shown before they are sent."""

from __future__ import annotations

import torch
from trace_world import TraceComm

from plait.sharded import ShardedTensor, explain
from plait.table.mesh import Mesh


def test_a_redistribution_in_words_and_bytes() -> None:
    comm = TraceComm(Mesh.parse("replica=2 tensor=4"))
    x = ShardedTensor(torch.zeros(2, 3).double(), "a/tensor b, pending(replica)", comm, (5, 3))
    assert str(explain(x, "a b")) == (
        "all_reduce over replica: 48 bytes, this rank sends 48      (redistribute)\n"
        "all_gather over tensor of dim 0: 192 bytes, this rank sends 144      (redistribute)"
    )
    assert explain(x, "a b").sent == 192
    assert str(explain(x, x.sharding)) == "sends nothing"
    whole = ShardedTensor(torch.zeros(5, 3), "a b", comm, (5, 3))
    assert str(explain(whole, "a/tensor b")) == "slice over tensor to dim 0: sends nothing"
    assert not comm.ledger.entries
