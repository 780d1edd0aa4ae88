"""From a move to messages: one collective for equal pieces, one broadcast or reduce per owner for unequal ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.table.cells import TABLE, Move, moves
from plait.table.flat import Cut, FlatLayout, Message, lay, lower
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


def even() -> FlatLayout:
    """Four pieces of 32."""
    return lay([("w", (100,))], 4, 4)


def uneven() -> FlatLayout:
    """Four pieces of 48, 0, 16 and 32, say."""
    return FlatLayout(lay([("a", (48,)), ("b", (16,)), ("c", (32,))], 4, 1).slots, 4, (0, 48, 48, 64, 96))


MESH = Mesh(replica=2, shard=2)  # ranks: replica 0 has 0 1, replica 1 has 2 3; pieces are shard/replica


@pytest.mark.parametrize(
    ("step", "rank", "messages"),
    [
        (Move("all_gather", BOTH), 0, [Message("all_gather", BOTH, 0, 128)]),
        (Move("all_gather", BOTH), 3, [Message("all_gather", BOTH, 0, 128)]),
        (Move("reduce_scatter", ("shard",)), 1, [Message("reduce_scatter", ("shard",), 0, 128)]),
        (Move("all_reduce", ("replica",), ("shard",)), 2, [Message("all_reduce", ("replica",), 0, 64)]),
        (Move("all_reduce", ("replica",), ("shard",)), 3, [Message("all_reduce", ("replica",), 64, 128)]),
        (Move("all_gather", ("replica",), ("shard",)), 1, [Message("all_gather", ("replica",), 64, 128)]),
        (Move("slice", BOTH), 0, []),
    ],
    ids=str,
)
def test_even_pieces_travel_in_one_collective(step: Move, rank: int, messages: list[Message]) -> None:
    assert list(lower(step, even(), MESH, rank)) == messages


@pytest.mark.parametrize(
    ("step", "rank", "messages"),
    [
        # a gather is a broadcast by each owner that has anything, a reduce-scatter a reduce to it
        (
            Move("all_gather", BOTH),
            1,
            [
                Message("broadcast", BOTH, 0, 48, root=0),
                Message("broadcast", BOTH, 48, 64, root=2),
                Message("broadcast", BOTH, 64, 96, root=3),
            ],
        ),
        (
            Move("reduce_scatter", ("shard",)),
            2,
            [Message("reduce", ("shard",), 0, 48, root=0), Message("reduce", ("shard",), 48, 96, root=1)],
        ),
        (Move("reduce_scatter", ("replica",), ("shard",)), 2, [Message("reduce", ("replica",), 0, 48, root=0)]),
        (
            Move("all_gather", ("replica",), ("shard",)),
            1,
            [
                Message("broadcast", ("replica",), 48, 64, root=0),
                Message("broadcast", ("replica",), 64, 96, root=1),
            ],
        ),
        (Move("all_reduce", ("replica",), ("shard",)), 0, [Message("all_reduce", ("replica",), 0, 48)]),
        (Move("slice", BOTH), 0, []),
    ],
    ids=str,
)
def test_uneven_pieces_travel_owner_by_owner(step: Move, rank: int, messages: list[Message]) -> None:
    assert list(lower(step, uneven(), MESH, rank)) == messages


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
