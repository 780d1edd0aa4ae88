"""What would be sent, told before it is sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tensor_cases import shard, values
from torch import Tensor, nn

from plait import run_threads
from plait.comm import Comm, TraceComm
from plait.sharded import LayoutError, ShardedTensor, annotate, auto_redistribute, explain
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


def test_an_expression_is_predicted_line_by_line() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc2(F.gelu(self.fc1(self.norm(x))))
            noise = torch.arange(6, device=x.device)
            return (self.norm(y) + noise).softmax(-1).sum()

    def body(comm: Comm) -> None:
        model = annotate(MLP(), {"fc1.weight": "out/tensor in", "fc2.weight": "out in/tensor"}, comm)
        x = ShardedTensor.from_full(values((3, 6), 1, False).float(), "batch in/tensor", comm)
        with auto_redistribute():
            told = explain(model, x)
            assert not comm.ledger.entries and told.entries
            model(x)
        assert comm.ledger.entries == told.entries
        assert "(auto layer_norm)" in str(told)

    run_threads("tensor=4", body)


def test_explicit_redistributions_and_full_are_seen_also_of_tensors_from_outside() -> None:
    def body(comm: Comm) -> None:
        w = shard(values((5, 6)), "a b/tensor", comm)

        def expression(x: ShardedTensor) -> Tensor:
            return F.linear(x.redistribute("a b"), w.redistribute("a/tensor b")).full()

        x = shard(values((4, 6)), "a/tensor b", comm)
        told = explain(expression, x)
        assert not comm.ledger.entries
        expression(x)
        assert comm.ledger.entries == told.entries and len(told.entries) == 3

    run_threads("tensor=3", body)


def test_a_tensor_that_comes_twice_is_gathered_once() -> None:
    def body(comm: Comm) -> None:
        x = shard(values((4, 3)), "a/tensor b", comm)
        with auto_redistribute():
            told = explain(lambda y: torch.cat([y, y]), x).entries
            mark = len(comm.ledger)
            torch.cat([x, x])
        assert told == tuple(comm.ledger.since(mark)) and told

    run_threads("tensor=2", body)


def test_what_would_be_refused_is_refused() -> None:
    comm = TraceComm(Mesh(tensor=2))
    x = shard(values((5, 6)), "a b/tensor", comm)
    with pytest.raises(LayoutError, match="softmax needs the dims"):
        explain(lambda x: x.softmax(-1), x)
    with pytest.raises(ValueError, match="to know the mesh"):
        explain(torch.relu, torch.zeros(3))
