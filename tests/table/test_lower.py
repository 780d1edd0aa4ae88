"""From a move to messages: one collective for equal pieces, one broadcast or reduce per owner for unequal ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.table.cells import TABLE, Move, moves
from plait.table.flat import Cut, lay, lower
from plait.table.mesh import Mesh

BOTH = ("shard", "replica")
SIZES = st.integers(1, 3)
MESHES = st.builds(Mesh, pipe=st.integers(1, 2), replica=SIZES, shard=SIZES, tensor=st.integers(1, 2))
SHAPES = st.lists(st.lists(st.integers(0, 20), max_size=2).map(tuple), max_size=5)
CUTS: st.SearchStrategy[Cut] = st.sampled_from(["element", "tensor"])
MOVES = sorted(
    {step for row in TABLE.values() for name, path in vars(moves(row)).items() if name != "summed" for step in path}
    | {
        Move("reduce_scatter", ("replica",)),
        Move("all_gather", ("shard",), ("replica",)),
        Move("all_reduce", ("shard",), ("replica",)),
        Move("reduce_scatter", ("replica", "shard")),
    },
    key=str,
)


MESH = Mesh(replica=2, shard=2)  # ranks: replica 0 has 0 1, replica 1 has 2 3; pieces are shard/replica


@pytest.mark.parametrize("step", MOVES, ids=str)
def test_groups_of_one_and_empty_buffers_send_nothing(step: Move) -> None:
    alone = Mesh(pipe=2, tensor=3)
    layout = lay([("w", (100,))], 4, 1)
    assert all(lower(step, layout, alone, rank) == () for rank in range(alone.size))
    nothing = lay([("w", (0, 5))], 4, 4)
    assert all(lower(step, nothing, MESH, rank) == () for rank in range(MESH.size))


@settings(max_examples=150, deadline=None)
@given(mesh=MESHES, step=st.sampled_from(MOVES), shapes=SHAPES, cut=CUTS, itemsize=st.sampled_from([2, 4]))
def test_all_ranks_of_a_group_send_the_same_in_the_same_order(
    mesh: Mesh, step: Move, shapes: list[tuple[int, ...]], cut: Cut, itemsize: int
) -> None:
    layout = lay([(f"p{i}", shape) for i, shape in enumerate(shapes)], itemsize, mesh.data_size, cut)
    outer, ways = mesh.count(step.outer), mesh.count(step.axes)
    for group in mesh.groups(step.axes):
        messages = lower(step, layout, mesh, group[0])
        assert all(lower(step, layout, mesh, rank) == messages for rank in group)
        start, stop = layout.piece(outer, mesh.index(group[0], step.outer))
        if step.kind == "slice" or ways == 1 or start == stop:
            assert messages == ()
            continue
        # together the messages hold the array of the move, once, in order
        assert messages[0].start == start and messages[-1].stop == stop
        assert all(a.stop == b.start for a, b in pairwise(messages))
        assert all(m.axes == step.axes and m.numel > 0 for m in messages)
        owned = [layout.piece(outer * ways, mesh.index(rank, (*step.outer, *step.axes))) for rank in group]
        for message in messages:
            if message.root >= 0:
                assert message.kind == {"all_gather": "broadcast", "reduce_scatter": "reduce"}[step.kind]
                assert (message.start, message.stop) == owned[message.root]  # the root is who owns it
            else:
                assert message.kind == step.kind and len(messages) == 1
                assert step.kind == "all_reduce" or {b - a for a, b in owned} == {message.numel // ways}
