"""Layouts as text, and every way from one to another: values, messages as explained, the way back of the gradient."""

import itertools
import math
from typing import Any

import pytest
import torch
from each_rank import each_rank
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_cases import MESHES, layouts, shard, values
from trace_world import TraceComm

from plait import run_threads
from plait.comm import Comm
from plait.sharded import ShardedTensor, explain, redistribute
from plait.sharded.layout import DUAL_KIND, FREE, Layout, entries, path, region
from plait.table.collectives import Note
from plait.table.mesh import Mesh
from plait.table.region import extent

MESH = Mesh.parse("replica=2 shard=3 tensor=2")


def parse(text: str) -> Layout:
    return Layout.parse(text)


def test_a_word_per_dim_with_its_axes_outermost_first() -> None:
    assert parse("out/tensor in") == Layout((("tensor",), ()))
    assert parse("batch/replica/shard time, pending(tensor)") == Layout((("replica", "shard"), ()), ("tensor",))
    assert parse("out in, pending(tensor, replica)") == parse("x  y,pending(replica tensor)")
    assert parse("scalar") == parse("") == Layout(())
    assert parse("scalar, pending(shard)") == Layout((), ("shard",))


@pytest.mark.parametrize(
    "text", ["d0/tensor d1", "d0 d1/replica/shard, pending(tensor)", "scalar", "scalar, pending(shard)"]
)
def test_text_goes_round(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("out/tnsor in", "'tnsor'"),
        ("out/tensor in/tensor", "'tensor' twice"),
        ("out/tensor, pending(tensor)", "'tensor' twice"),
        ("out/ in", "a word per dim"),
        ("/tensor in", "a word per dim"),
        ("out in pending(", "a word per dim"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_the_words_of_the_field() -> None:
    layout = parse("out/tensor in, pending(replica)")
    assert layout.placements(MESH) == {"replica": "Partial(sum)", "shard": "Replicate", "tensor": "Shard(0)"}


def test_axes_of_size_one_say_nothing() -> None:
    assert parse("a/tensor b/shard, pending(replica)").on(Mesh(shard=2)) == parse("a b/shard")


def test_a_gradient_is_pending_where_its_value_is_replicated_and_the_other_way_round() -> None:
    assert parse("out/tensor in, pending(replica)").dual(MESH) == parse("out/tensor in, pending(shard)")
    for text in ("a b", "a/shard b", "a/shard/tensor b/replica", "a b, pending(shard, tensor)"):
        assert parse(text).dual(MESH).dual(MESH) == parse(text)


def test_five_rows_on_four_ranks() -> None:
    held = [region(parse("row/tensor column"), (5, 3), Mesh(tensor=4), r) for r in range(4)]
    assert held == [((a, b), (0, 3)) for a, b in ((0, 2), (2, 4), (4, 5), (5, 5))]
    assert [extent(h) for h in held] == [(2, 3), (2, 3), (1, 3), (0, 3)]


@pytest.mark.parametrize("shape", [(5, 4), (0, 3), (1, 1), (7, 2)])
def test_the_pieces_of_all_ranks_tile_the_tensor(shape: tuple[int, int]) -> None:
    for text in ("a/shard b", "a/tensor/shard b", "a/shard b/tensor", "a b/replica/shard/tensor"):
        layout = parse(text)
        covered = [0] * math.prod(shape)
        for rank in range(MESH.size):
            box = region(layout, shape, MESH, rank)
            for i, j in itertools.product(*(range(a, b) for a, b in box)):
                covered[i * shape[1] + j] += 1
        assert set(covered) <= {MESH.size // MESH.count(layout.cut)}


def test_another_number_of_dims_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"has 1 dims, the shape .* has 2"):
        region(parse("row/tensor"), (5, 3), MESH, 0)
    with pytest.raises(ValueError, match="has 2 dims and"):
        path(parse("a b"), parse("a"), MESH)


PATHS = [
    ("a/tensor b", "a b", "all_gather over tensor of dim 0"),
    ("a b", "a/tensor b", "slice over tensor to dim 0"),
    ("a b, pending(tensor)", "a b", "all_reduce over tensor"),
    ("a b, pending(tensor)", "a b/tensor", "reduce_scatter over tensor to dim 1"),
    ("a/tensor b", "a b/tensor", "all_to_all over tensor from dim 0 to dim 1"),
    ("a/tensor b", "a b, pending(tensor)", "place over tensor of dim 0"),
    ("a b", "a b, pending(tensor)", "keep_first over tensor"),
    ("a/shard/tensor b", "a b", "all_gather over shard, tensor of dim 0"),
    ("a b", "a/shard/tensor b", "slice over shard, tensor to dim 0"),
    ("a b, pending(shard, tensor)", "a/shard/tensor b", "reduce_scatter over shard, tensor to dim 0"),
    ("a/shard/tensor b", "a b/shard/tensor", "all_to_all over shard, tensor from dim 0 to dim 1"),
    ("a/shard b/tensor", "a/shard b", "all_gather over tensor of dim 1"),
    # what shrinks the tensor comes first
    ("a b/tensor", "a/shard b", "slice over shard to dim 0; all_gather over tensor of dim 1"),
    ("a b, pending(shard, tensor)", "a/shard b", "reduce_scatter over shard to dim 0; all_reduce over tensor"),
    ("a b/tensor, pending(shard)", "a b", "all_reduce over shard; all_gather over tensor of dim 1"),
    # an axis that lies under another is gathered before it can move
    ("a/shard/tensor b", "a/tensor b", "all_gather over shard, tensor of dim 0; slice over tensor to dim 0"),
    ("a/shard/tensor b", "a b/shard", "all_gather over tensor of dim 0; all_to_all over shard from dim 0 to dim 1"),
]


@pytest.mark.parametrize(("start", "end", "steps"), PATHS)
def test_the_steps_of_a_path(start: str, end: str, steps: str) -> None:
    assert "; ".join(map(str, path(parse(start), parse(end), MESH))) == steps


def everything(num_dims: int, axes: tuple[str, ...]) -> list[Layout]:
    found = []
    for order in itertools.permutations(axes):
        for places in itertools.product(range(-2, num_dims), repeat=len(axes)):
            dims = [tuple(a for a, p in zip(order, places, strict=True) if p == d) for d in range(num_dims)]
            found.append(Layout(tuple(dims), tuple(a for a, p in zip(order, places, strict=True) if p == -2)))
    return sorted(set(found), key=str)


def test_every_layout_leads_to_every_other_in_four_steps_and_the_dual_leads_back() -> None:
    mesh = Mesh.parse("replica=2 tensor=2")
    layouts = everything(2, ("replica", "tensor"))
    for start, end in itertools.product(layouts, layouts):
        steps = path(start, end, mesh)
        assert [s.before for s in steps] == [start, *(s.after for s in steps)][: len(steps)]
        assert not steps or steps[-1].after == end
        assert bool(steps) == (start != end) and len(steps) <= 4
        back = [s.dual(mesh) for s in reversed(steps)]
        assert not back or (back[0].before, back[-1].after) == (end.dual(mesh), start.dual(mesh))
        assert all(a.after == b.before for a, b in itertools.pairwise(back))


def lines(start: str, end: str, shape: tuple[int, ...], mesh: Mesh, rank: int = 0) -> list[tuple[str, int, int]]:
    found = entries(path(parse(start), parse(end), mesh), shape, mesh, rank, 8, Note("x"))
    return [(e.kind, e.bytes, e.sent) for e in found]


def test_uneven_pieces_travel_padded_to_the_largest() -> None:
    four = Mesh(tensor=4)
    assert lines("a/tensor b", "a b", (5, 3), four) == [("all_gather", 4 * 2 * 3 * 8, 3 * 2 * 3 * 8)]
    assert lines("a b, pending(tensor)", "a/tensor b", (5, 3), four) == [("reduce_scatter", 192, 144)]
    assert lines("a b, pending(tensor)", "a b", (5, 3), four) == [("all_reduce", 120, 2 * 3 * 120 // 4)]
    assert lines("a/tensor b", "a b/tensor", (5, 3), four) == [("all_to_all", 4 * 2 * 1 * 8, 3 * 2 * 8)]
    assert lines("a/tensor b", "a b", (8, 3), four) == [("all_gather", 192, 144)]


def test_what_is_free_and_what_is_empty_is_no_line() -> None:
    assert lines("a b", "a/tensor b", (5, 3), Mesh(tensor=4)) == []
    assert lines("a b", "a b, pending(tensor)", (5, 3), Mesh(tensor=4)) == []
    assert lines("a/tensor b", "a b", (5, 0), Mesh(tensor=4)) == []
    assert lines("a/tensor b", "a b", (5, 3), Mesh(shard=4)) == []


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


@each_rank("tensor=3")
def test_nothing_is_shared_with_the_tensor_that_was_redistributed(comm: Comm) -> None:
    x = ShardedTensor.from_full(values((5, 3), requires_grad=False), "a b", comm)
    before = x.local.clone()
    for layout in ("a/tensor b", "a b, pending(tensor)"):
        x.redistribute(layout).zero_()
        assert torch.equal(x.local, before)
    cut = x.redistribute("a/tensor b")
    cut.redistribute("a b").zero_()
    assert torch.equal(cut.full(), before)


@each_rank("tensor=3")
def test_the_same_layout_is_the_same_tensor(comm: Comm) -> None:
    x = ShardedTensor.from_full(values((5, 3)), "a/tensor b", comm)
    assert x.redistribute("rows/tensor columns") is x
    assert x.redistribute("rows/tensor columns/shard") is x, "shard has size 1"


@each_rank("tensor=2")
def test_other_numbers_of_dims_and_other_things_are_refused(comm: Comm) -> None:
    x = ShardedTensor.from_full(values((5, 3)), "a/tensor b", comm)
    with pytest.raises(ValueError, match="has 1 dims"):
        x.redistribute("a")
    with pytest.raises(ValueError, match="from_full"):
        redistribute(values((5, 3)), "a b")


@each_rank("tensor=3")
def test_the_backward_of_a_backward_goes_through_a_redistribution(comm: Comm) -> None:
    full = values((4, 3))
    first = torch.autograd.grad((full**3).sum(), full, create_graph=True)[0]
    second = torch.autograd.grad((first**2).sum(), full)[0]

    x = ShardedTensor.from_full(full, "a/tensor b", comm)
    y = x.redistribute("a b")
    (grad,) = torch.autograd.grad((y**3).redistribute("a/tensor b").sum(), x, create_graph=True)
    assert grad.sharding == x.sharding
    (again,) = torch.autograd.grad((grad**2).sum(), x)
    torch.testing.assert_close(again.full(), second)


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
