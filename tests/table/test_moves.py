"""Moves of a row's state, and the messages that they become."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.table.cells import FULL, TABLE, UNREDUCED, Cell, Move, Strategy, by_host, move, moves
from plait.table.flat import Cut, lay, lower
from plait.table.mesh import DATA_AXES, ONE_HOST, Mesh

CELLS = [
    Cell(split, pending)
    for cut in range(3)
    for split in permutations(DATA_AXES, cut)
    for sums in range(3 - cut)
    for pending in permutations([a for a in DATA_AXES if a not in split], sums)
]


def accepted() -> Iterable[Strategy]:
    """Every row that is not refused: the eight of the table and sixty more."""
    for cells in product(CELLS, repeat=4):
        try:
            yield Strategy("mine", *cells)
        except ValueError:
            continue


ROWS = list(accepted())
SIZES = st.integers(1, 3)

# ---- a toy state -----------------------------------------------------------------------------------------

Element = tuple[int, tuple[tuple[int, int], ...]]
"""An element's number, and how often each rank's contribution is in its value."""
Toy = list[list[Element]]
"""The elements that every rank holds, in order."""


def meaning(cell: Cell, mesh: Mesh, numel: int) -> Toy:
    """The ranks' elements under a cell, written down without any move."""
    ways = mesh.count(cell.split)
    size = numel // ways
    state = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        alike = [r for r in mesh.group(rank, DATA_AXES) if all(mesh.coordinates(r)[a] == here[a] for a in cell.pending)]
        start = mesh.index(rank, cell.split) * size
        state.append([(e, tuple((r, 1) for r in sorted(alike))) for e in range(start, start + size)])
    return state


def summed(parts: Iterable[list[Element]]) -> list[Element]:
    """Sum of arrays; elements that are not the same one do not add."""
    result = []
    for elements in zip(*parts, strict=True):
        numbers = {number for number, _ in elements}
        assert len(numbers) == 1, f"elements {numbers} are added to each other"
        count: Counter[int] = Counter()
        for _, ranks in elements:
            count.update(dict(ranks))
        result.append((numbers.pop(), tuple(sorted(count.items()))))
    return result


def carry_out(step: Move, state: Toy, mesh: Mesh, numel: int) -> Toy:
    """One move, by the definition of its collective."""
    ways, whole = mesh.count(step.axes), numel // mesh.count(step.outer)
    result: Toy = [[] for _ in state]
    for group in mesh.groups(step.axes):
        arrays = [state[rank] for rank in group]
        size = whole // ways if step.kind == "all_gather" else whole
        assert {len(array) for array in arrays} == {size}, f"{step} starts from arrays of another size"
        for k, rank in enumerate(group):
            mine = slice(k * whole // ways, (k + 1) * whole // ways)
            match step.kind:
                case "all_reduce":
                    result[rank] = summed(arrays)
                case "reduce_scatter":
                    result[rank] = summed(arrays)[mine]
                case "all_gather":
                    result[rank] = [element for array in arrays for element in array]
                case "slice":
                    result[rank] = arrays[k][mine]
                case _:
                    raise AssertionError(step)
    return result


def follow(start: Cell, *cells: Cell, mesh: Mesh, numel: int) -> None:
    """Walk from cell to cell, by way of the hosts, and hold the state against each cell's meaning."""
    state, here = meaning(start, mesh, numel), start
    for end in cells:
        for step in (part for whole in move(here, end) for part in by_host(whole, mesh)):
            state = carry_out(step, state, mesh, numel)
        assert state == meaning(end, mesh, numel), f"{here} -> {end}: {', '.join(map(str, move(here, end)))}"
        here = end


def reachable(start: Cell, end: Cell) -> bool:
    """One cut begins the other, and no finished sum is pending again."""
    short = min(len(start.split), len(end.split))
    return start.split[:short] == end.split[:short] and {*end.pending} <= {*start.pending}


@pytest.mark.parametrize("start", CELLS, ids=str)
def test_every_move_ends_in_the_meaning_of_its_cell(start: Cell) -> None:
    mesh = Mesh(replica=2, shard=3)
    for end in CELLS:
        if reachable(start, end):
            follow(start, end, mesh=mesh, numel=12)
        else:
            with pytest.raises(ValueError, match=r"full reshuffle|finished sum"):
                move(start, end)


def on_hosts(mesh: Mesh) -> st.SearchStrategy[Mesh]:
    return st.sampled_from([replace(mesh, hosts=n) for n in range(1, mesh.size + 1) if mesh.size % n == 0])


ON_ONE_HOST = st.builds(Mesh, pipe=st.integers(1, 2), replica=SIZES, shard=SIZES, tensor=st.integers(1, 2))
MESHES = ON_ONE_HOST.flatmap(on_hosts)


@settings(max_examples=120, deadline=None)
@given(mesh=MESHES, start=st.sampled_from(CELLS), data=st.data(), grains=st.integers(0, 3))
def test_move_then_move_back(mesh: Mesh, start: Cell, data: st.DataObject, grains: int) -> None:
    ends = [cell for cell in CELLS if reachable(start, cell)]
    end = data.draw(st.sampled_from(ends))
    follow(start, end, FULL, end if not end.pending else FULL, mesh=mesh, numel=grains * mesh.data_size)


@settings(max_examples=80, deadline=None)
@given(mesh=MESHES, row=st.sampled_from(ROWS), grains=st.integers(1, 2))
def test_a_step_leads_every_state_where_its_row_says(mesh: Mesh, row: Strategy, grains: int) -> None:
    numel = grains * mesh.data_size
    follow(row.params, FULL, row.kept, FULL, mesh=mesh, numel=numel)
    follow(UNREDUCED, row.grads, row.optim, row.params, FULL, mesh=mesh, numel=numel)


def test_the_toy_state_notices_a_wrong_move() -> None:
    mesh, numel = Mesh(replica=2, shard=2), 4
    start = meaning(UNREDUCED, mesh, numel)
    right = carry_out(Move("reduce_scatter", ("shard", "replica")), start, mesh, numel)
    assert right == meaning(Cell(("shard", "replica")), mesh, numel)
    for wrong in (
        Move("reduce_scatter", ("replica", "shard")),  # the other nesting
        Move("reduce_scatter", ("shard",)),  # a sum forgotten
        Move("slice", ("shard", "replica")),
    ):
        assert carry_out(wrong, start, mesh, numel) != meaning(Cell(("shard", "replica")), mesh, numel)
    once = carry_out(Move("all_reduce", ("shard",)), start, mesh, numel)
    assert carry_out(Move("all_reduce", ("shard",)), once, mesh, numel) != once  # a sum taken twice


def test_what_crosses_hosts_goes_by_way_of_them() -> None:
    """Each rank sends a part of it, and the sums are taken in the same order."""
    mesh = Mesh(replica=2, shard=4, hosts=2)
    both, inside, across = DATA_AXES, ("shard",), ("replica",)
    summed, split = Move("reduce_scatter", inside), Move("reduce_scatter", across, inside)
    spread, joined = Move("all_gather", inside), Move("all_gather", across, inside)
    assert by_host(Move("all_reduce", both), mesh) == (summed, Move("all_reduce", across, inside), spread)
    assert by_host(Move("reduce_scatter", both), mesh) == (summed, split)
    assert by_host(Move("all_gather", both), mesh) == (joined, spread)
    for one, there in (
        (Move("all_reduce", both), ONE_HOST),
        (Move("all_reduce", both), replace(mesh, hosts=1)),
        (Move("all_reduce", both), replace(mesh, hosts=4)),  # both axes cross
        (Move("reduce_scatter", ("replica", "shard")), mesh),  # the sum over hosts is taken first
        (Move("all_reduce", across, inside), mesh),
        (Move("all_gather", inside), mesh),
        (Move("slice", both), mesh),
        (Move("all_reduce", both), Mesh(replica=4, hosts=2)),  # nothing to sum inside
    ):
        assert by_host(one, there) == (one,), f"{one} on {there}"


# ---- messages of a move: a collective for equal pieces, a broadcast or reduce per owner for unequal ones -------------

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
@given(mesh=ON_ONE_HOST, step=st.sampled_from(MOVES), shapes=SHAPES, cut=CUTS, itemsize=st.sampled_from([2, 4]))
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
