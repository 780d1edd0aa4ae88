"""The flat buffer: where parameters start, where it is cut, and what every piece holds."""

import math
from itertools import combinations_with_replacement, product

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.table.flat import Cut, Run, lay, regions
from plait.table.region import extent

ITEMSIZES = (1, 2, 4, 8)
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6)
CUTS: st.SearchStrategy[Cut] = st.sampled_from(["element", "tensor"])


def named(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


# ---- examples --------------------------------------------------------------------------------------------


def test_the_picture_of_the_docstring() -> None:
    layout = lay([("w", (5, 7)), ("b", (7,))], itemsize=4, num_pieces=2)
    w, b = layout.slots
    assert (w.offset, w.end, b.offset, b.end) == (0, 35, 48, 55)
    assert layout.numel == 64 and layout.bounds == (0, 32, 64)
    assert layout.runs(0, 32) == (Run(w, 0, 32, 0),)
    assert layout.runs(32, 64) == (Run(w, 32, 35, 0), Run(b, 0, 7, 16))
    assert [run.whole for run in layout.runs(32, 64)] == [False, True]


# ---- any shapes, any number of pieces --------------------------------------------------------------------


@given(shapes=SHAPES, itemsize=st.sampled_from(ITEMSIZES), num_pieces=st.integers(1, 12), cut=CUTS)
def test_parameters_and_cuts_are_aligned(
    shapes: list[tuple[int, ...]], itemsize: int, num_pieces: int, cut: Cut
) -> None:
    layout = lay(named(shapes), itemsize, num_pieces, cut)
    for place in (*(slot.offset for slot in layout.slots), *layout.bounds):
        assert place % 16 == 0 and place * itemsize % 64 == 0
    assert [(s.name, s.shape) for s in layout.slots] == named(shapes)
    # one after the other, without overlap, with gaps below the alignment
    end, grain = 0, max(16, 64 // itemsize)
    for slot in layout.slots:
        assert slot.numel == math.prod(slot.shape)
        assert 0 <= slot.offset - end < grain
        end = slot.end
    assert end <= layout.numel
    assert layout.num_pieces == num_pieces
    assert list(layout.bounds) == sorted(layout.bounds) and layout.bounds[0] == 0
    if cut == "element":
        assert layout.even
        assert layout.numel - end < grain * (num_pieces + 1)  # padding is less than a grain a piece


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, itemsize=st.sampled_from(ITEMSIZES), num_pieces=st.integers(1, 12), cut=CUTS)
def test_runs_hold_every_element_exactly_once(
    shapes: list[tuple[int, ...]], itemsize: int, num_pieces: int, cut: Cut
) -> None:
    layout = lay(named(shapes), itemsize, num_pieces, cut)
    next_element = {slot.name: 0 for slot in layout.slots}
    for k in range(num_pieces):
        start, stop = layout.piece(num_pieces, k)
        free = 0
        for run in layout.runs(start, stop):
            assert free <= run.offset and run.offset + run.numel <= stop - start  # inside, without overlap
            free = run.offset + run.numel
            assert start + run.offset == run.slot.offset + run.start  # the elements there agree with it
            assert run.start == next_element[run.slot.name] < run.stop  # goes on where the last piece ended
            next_element[run.slot.name] = run.stop
            assert run.whole == (run.start == 0 and run.stop == run.slot.numel)
            assert run.whole or cut == "element"  # a tensor cut never splits a parameter
    assert next_element == {slot.name: slot.numel for slot in layout.slots}


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    loads=st.lists(st.integers(0, 12).map(lambda n: n * 64), min_size=1, max_size=4),
    itemsize=st.sampled_from(ITEMSIZES),
)
def test_the_tensor_cut_is_the_best_there_is(sizes: list[int], loads: list[int], itemsize: int) -> None:
    """Against every cut there is: the fullest owner, with what it has already, is as empty as it can be."""
    layout = lay(named([(16 * n,) for n in sizes]), itemsize, len(loads), "tensor", loads)
    starts = [*(slot.offset for slot in layout.slots), layout.numel]

    def fullest(bounds: tuple[int, ...]) -> int:
        return max(load + (b - a) * itemsize for load, a, b in zip(loads, bounds, bounds[1:], strict=False))

    every = ((0, *inner, starts[-1]) for inner in combinations_with_replacement(starts, len(loads) - 1))
    assert fullest(layout.bounds) == min(map(fullest, every))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted), max_size=6),
    owners=st.integers(1, 4),
)
def test_pieces_on_other_tensor_ranks_have_the_same_owners(sizes: list[list[int]], owners: int) -> None:
    first = lay(named([(large,) for _, large in sizes]), 4, owners, "tensor")
    other = lay(named([(small,) for small, _ in sizes]), 4, owners, "tensor", like=first)
    for a, b in zip(first.slots, other.slots, strict=True):
        of = [
            [k for k in range(owners) if one.bounds[k] <= at < one.bounds[k + 1]]
            for one, at in ((first, a.offset), (other, b.offset))
        ]
        assert of[0] == of[1] or not b.numel


# ---- runs as regions -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_regions_have_the_elements_of_the_run_in_their_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = regions(shape, start, stop)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    elements = [
        sum(at * stride for at, stride in zip(place, strides, strict=True))
        for region in found
        for place in product(*(range(*bounds) for bounds in region))
    ]
    assert elements == list(range(start, stop)) and len(found) <= max(1, 2 * len(shape) - 1)
    assert all(size > 0 for region in found for size in extent(region))
