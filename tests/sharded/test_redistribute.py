"""Every way from layout to layout: values, messages as explained, and the way back of the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_cases import MESHES, layouts, shard, values
from trace_world import TraceComm

from plait import run_threads
from plait.comm import Comm
from plait.sharded import ShardedTensor, explain, redistribute
from plait.sharded.layout import DUAL_KIND, FREE, Layout, entries, path
from plait.table.collectives import Note
from plait.table.mesh import Mesh

SHAPES = [(5, 3), (4, 6), (5, 1, 4), (7,), (0, 3), (1, 1), (2, 0, 3)]


@st.composite
def moves(draw: Any) -> tuple[str, tuple[int, ...], Layout, Layout]:
    mesh, shape = draw(st.sampled_from(MESHES)), draw(st.sampled_from(SHAPES))
    grid = Mesh.parse(mesh)
    return mesh, shape, draw(layouts(grid, len(shape))), draw(layouts(grid, len(shape)))


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(moves())
def test_value_ledger_and_gradient(move: tuple[str, tuple[int, ...], Layout, Layout]) -> None:
    mesh, shape, start, end = move
    full, weight = values(shape), values(shape, 3, False)
    note = Note("redistribute")

    def body(comm: Comm) -> None:
        x = shard(full, start, comm)
        predicted = explain(x, end)
        assert not comm.ledger.entries, "explain sent something"
        y = x.redistribute(end)
        assert y.sharding == end.on(comm.mesh)
        steps = path(x.sharding, y.sharding, comm.mesh)
        assert comm.ledger.entries == predicted.entries
        assert comm.ledger.entries == tuple(entries(steps, shape, comm.mesh, comm.rank, 8, note))
        assert {e.kind for e in predicted.entries} <= {s.kind for s in steps if s.kind not in FREE}
        torch.testing.assert_close(y.full(), full.detach(), rtol=1e-12, atol=1e-12)

        comm.ledger.clear()
        y.backward(weight)
        back = tuple(s.dual(comm.mesh) for s in reversed(steps))
        assert [s.kind for s in back] == [DUAL_KIND[s.kind] for s in reversed(steps)]
        on_the_way_back = tuple(entries(back, shape, comm.mesh, comm.rank, 8, Note("redistribute backward")))
        assert comm.ledger.entries == on_the_way_back
        assert x.grad is not None and x.grad.sharding == x.sharding.dual(comm.mesh)
        torch.testing.assert_close(x.grad.full(), weight, rtol=1e-12, atol=1e-12)

    run_threads(mesh, body)


def test_nothing_is_shared_with_the_tensor_that_was_redistributed() -> None:
    def body(comm: Comm) -> None:
        x = ShardedTensor.from_full(values((5, 3), requires_grad=False), "a b", comm)
        before = x.local.clone()
        for layout in ("a/tensor b", "a b, pending(tensor)"):
            x.redistribute(layout).zero_()
            assert torch.equal(x.local, before)
        cut = x.redistribute("a/tensor b")
        cut.redistribute("a b").zero_()
        assert torch.equal(cut.full(), before)

    run_threads("tensor=3", body)


def test_the_same_layout_is_the_same_tensor() -> None:
    def body(comm: Comm) -> None:
        x = ShardedTensor.from_full(values((5, 3)), "a/tensor b", comm)
        assert x.redistribute("rows/tensor columns") is x
        assert x.redistribute("rows/tensor columns/shard") is x, "shard has size 1"

    run_threads("tensor=3", body)


def test_other_numbers_of_dims_and_other_things_are_refused() -> None:
    def body(comm: Comm) -> None:
        x = ShardedTensor.from_full(values((5, 3)), "a/tensor b", comm)
        with pytest.raises(ValueError, match="has 1 dims"):
            x.redistribute("a")
        with pytest.raises(ValueError, match="from_full"):
            redistribute(values((5, 3)), "a b")

    run_threads("tensor=2", body)


def test_the_backward_of_a_backward_goes_through_a_redistribution() -> None:
    full = values((4, 3))
    first = torch.autograd.grad((full**3).sum(), full, create_graph=True)[0]
    second = torch.autograd.grad((first**2).sum(), full)[0]

    def body(comm: Comm) -> None:
        x = ShardedTensor.from_full(full, "a/tensor b", comm)
        y = x.redistribute("a b")
        (grad,) = torch.autograd.grad((y**3).redistribute("a/tensor b").sum(), x, create_graph=True)
        assert grad.sharding == x.sharding
        (again,) = torch.autograd.grad((grad**2).sum(), x)
        torch.testing.assert_close(again.full(), second)

    run_threads("tensor=3", body)


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
