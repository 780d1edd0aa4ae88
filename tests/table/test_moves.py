"""What a cell means, and that moves keep it: move, then gather, gives the original.

First on a toy state that can only be right for the right reason: an element's value is the *set of ranks* whose
contributions it has summed.  Then on real tensors, through the thread world and the units of the engine.

    cell             holds on a rank             an element's value there
    full             every element               contributions of all data ranks
    split a          its piece of the elements   contributions of all data ranks
    pending(a)       every element               those from ranks at its own place on a
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.forward.parameter import AtRest
from plait.step import Engine
from plait.table.cells import FULL, TABLE, UNREDUCED, Cell, Move, Strategy, by_host, move, moves
from plait.table.collectives import Note
from plait.table.flat import Cut, lay
from plait.table.mesh import DATA_AXES, ONE_HOST, Mesh
from plait.zero.storage import Flat
from plait.zero.transfers import send, transfers
from plait.zero.unit import State, Unit

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
"""What every rank holds, in order."""


def meaning(cell: Cell, mesh: Mesh, numel: int) -> Toy:
    """What the ranks hold under a cell, written down without any move."""
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


MESHES = st.builds(Mesh, pipe=st.integers(1, 2), replica=SIZES, shard=SIZES, tensor=st.integers(1, 2)).flatmap(on_hosts)


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


# ---- real tensors ----------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)
WORLDS = st.sampled_from(
    [
        *(Mesh(replica=r, shard=s) for r, s in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2))),
        Mesh(replica=2, shard=2, tensor=2),
        Mesh(pipe=2, shard=3),
        *(Mesh(replica=r, shard=s, hosts=r) for r, s in ((2, 2), (2, 3), (3, 2))),
        Mesh(pipe=2, replica=2, shard=2, hosts=4),
    ]
)
CUTS: st.SearchStrategy[Cut] = st.sampled_from(["element", "tensor"])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
NOTE = Note("test")
NAN = float("nan")


def poison(flat: Flat) -> None:
    """Leave no old values in the memory that the next gather will be given."""
    if flat.split:
        storage = flat.full.untyped_storage()
        storage.resize_(flat.full.numel() * flat.full.element_size())
        flat.full.fill_(NAN)
        storage.resize_(0)


def gathered(unit: Unit, phase: str) -> list[Tensor]:
    poison(unit.flats[0])
    if unit.split:
        unit.unshard(phase, 0)
        assert unit.state is State.UNSHARDING and isinstance(unit.flats[0].parameters[0], AtRest)
        unit.wait()
    return [p.detach().clone() for p in unit.flats[0].parameters]


def at_rest(unit: Unit) -> None:
    if unit.split:
        unit.reshard()


def equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@settings(max_examples=60, deadline=None)
@given(mesh=WORLDS, row=st.sampled_from(ROWS), shapes=SHAPES, cut=CUTS, dtype=DTYPES, seed=st.integers(0, 999))
def test_a_unit_gathers_what_was_written_and_what_was_updated(
    mesh: Mesh, row: Strategy, shapes: list[tuple[int, ...]], cut: Cut, dtype: torch.dtype, seed: int
) -> None:
    """Storage -> pieces -> forward -> kept -> backward; gradients -> sums -> update -> publish -> forward."""
    random = torch.Generator().manual_seed(seed)

    def some() -> list[Tensor]:
        return [torch.randint(-7, 8, shape, generator=random).to(dtype) for shape in shapes]

    values, contributions = some(), [some() for _ in range(mesh.data_size)]
    sums = [torch.stack(each).sum(0) for each in zip(*contributions, strict=True)]  # small integers: exact
    named = [(f"p{i}", shape) for i, shape in enumerate(shapes)]
    layout = lay(named, dtype.itemsize, mesh.data_size, cut)

    def rank_main(comm: Comm) -> None:
        plan = moves(row, mesh)
        parameters = [nn.Parameter(torch.zeros_like(v)) for v in values]
        flat = Flat(layout, parameters, row, comm, [None] * len(values), False)
        unit = Unit("u", nn.Module(), [flat], plan, comm)
        flat.rest.fill_(NAN)
        for index, value in enumerate(values):
            flat.write(index, value)
        assert equal(gathered(unit, "forward"), values)
        unit.keep()
        at_rest(unit)
        assert equal(gathered(unit, "backward"), values)
        unit.forget()
        at_rest(unit)

        # This rank's gradients, and what the row's moves make of them; what a cell does not hold is forgotten.
        whole = torch.full((layout.numel,), NAN, dtype=dtype)
        for slot, mine in zip(layout.slots, contributions[mesh.data_rank(comm.rank)], strict=True):
            whole[slot.offset : slot.end] = mine.reshape(-1)
        for path, cell in ((plan.microbatch, row.grads), (plan.step, row.optim)):
            for message in transfers(path, layout, comm):
                send(comm, message, whole, 0, NOTE).wait()
            start, stop = flat.place(cell)
            whole[:start], whole[stop:] = NAN, NAN

        # The update: this rank's new values are the sums that it owns.
        start, stop = flat.optim_place
        base = flat.held[0]
        flat.rest.fill_(NAN)
        flat.rest[start - base : stop - base] = whole[start:stop]
        for work in unit.publish():
            work.wait()
        assert equal(gathered(unit, "forward"), sums)

    run(mesh, rank_main, deadline=20)


class Odd(nn.Module):
    """A buffer, a frozen parameter, a scalar, one of size zero, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("mean", torch.randn(3))


class Model(nn.Module):
    """Blocks of any widths, odd parameters, and a weight that is tied: over stages where there are any."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.odd = Odd()
        self.tied = nn.Linear(widths[0], widths[1], bias=False)
        self.tied.weight = self.blocks[0].weight

    def pipeline_links(self) -> list[str]:
        return [*(f"blocks.{i}" for i in range(len(self.blocks))), "odd", "tied"]


@settings(max_examples=25, deadline=None)
@given(
    mesh=WORLDS,
    row=st.sampled_from(ROWS),
    widths=st.lists(st.integers(1, 23), min_size=2, max_size=5),
    cut=CUTS,
    seed=st.integers(0, 999),
)
def test_an_engine_gives_back_the_model_that_it_was_given(
    mesh: Mesh, row: Strategy, widths: list[int], cut: Cut, seed: int
) -> None:
    torch.manual_seed(seed)
    models = [Model(widths) for _ in range(mesh.size + 1)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    original = {name: value.clone() for name, value in models[-1].state_dict().items()}
    other = {name: value + 1 for name, value in original.items()}

    def rank_main(comm: Comm) -> None:
        engine = Engine(models[comm.rank], comm, strategy=row, cut=cut, tensor_plan={})
        for state in (original, other):
            if state is other:
                engine.load_full_state_dict(other)
            whole = engine.full_state_dict()
            assert whole.keys() == state.keys()
            for name, value in state.items():
                assert whole[name].dtype == value.dtype and torch.equal(whole[name], value), name

    run(mesh, rank_main, deadline=20)


@pytest.mark.parametrize("row", TABLE)
def test_a_tensor_that_fills_its_unit_is_still_everyones(row: str) -> None:
    """With cut="tensor" one rank's piece is then the whole buffer and the others' are empty: all must send alike."""
    torch.manual_seed(0)
    mesh, num_steps = Mesh(replica=2, shard=2), 2
    models = [nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)) for _ in range(mesh.size + 1)]
    alone = models[-1]
    for model in models[:-1]:
        model.load_state_dict(alone.state_dict())
    batches = [[torch.randn(2, 3) for _ in range(2)] for _ in range(mesh.size)]

    def loss_sum(model: nn.Module, x_BD: Tensor) -> Tensor:
        return torch.as_tensor(model(x_BD).square().sum())

    def rank_main(comm: Comm) -> dict[str, Tensor]:
        model = models[comm.rank]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(
            model,
            comm,
            strategy=row,
            cut="tensor",
            units=["0", "1"],
            optimizer=sgd,
            loss_fn=loss_sum,
            count_fn=len,
        )
        for _ in range(num_steps):
            engine.step(batches[mesh.data_rank(comm.rank)])
        return engine.full_state_dict()

    states = run(mesh, rank_main, deadline=20)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    whole = torch.cat([x for each in batches for x in each])
    for _ in range(num_steps):
        sgd.zero_grad()
        (loss_sum(alone, whole) / len(whole)).backward()
        sgd.step()
    for state in states:
        torch.testing.assert_close(state, {n: p.detach() for n, p in alone.named_parameters()})
