"""The values of flat buffers without numbers: which samples are in a sum, and in which order they were added.

    leaf (d, t, m)              part d of the batch in microbatch m (t: a tensor rank's share)
    a + b                       a number for each pair of terms; equal sums have equal numbers
    [(0, 64, 7), (96, 128, 7)]  elements 0..63 and 96..127 of a buffer have value 7; 64..95 were never written

``table.additions.fold``, which the replay of ``plait verify`` also uses, makes the sum that a row promises.  The
machine makes the sum that results from the messages.  Equal numbers prove that the sum has every sample once, in the
promised order.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from plait.predict.experts import AXES_OF_EXPERTS
from plait.referee.prove.program import Op
from plait.table.additions import MICROBATCH, additions, fold
from plait.table.cells import DENSE, EXPERTS, StateAxes, Strategy
from plait.table.mesh import AXES, Mesh

# ---- values by intervals

Pieces = list[tuple[int, int, int | None]]
"""Intervals with their values; None, like a gap, is memory with unknown content."""


def cut(pieces: Sequence[tuple[int, int, int | None]], start: int, stop: int) -> Pieces:
    """The pieces in an interval, without gaps."""
    if len(pieces) == 1:  # the usual case
        a, b, value = pieces[0]
        a, b = max(a, start), min(b, stop)
        return [(a, b, value)] if a < b else []
    return [(max(a, start), min(b, stop), v) for a, b, v in pieces if a < stop and start < b]


def write(pieces: Sequence[tuple[int, int, int | None]], start: int, stop: int, values: Pieces) -> Pieces:
    """Returns the buffer with an interval replaced by ``values``, which are inside it."""
    if start >= stop:
        return list(pieces)
    kept = [(a, min(b, start), v) for a, b, v in pieces if a < start]
    after = [(max(a, stop), b, v) for a, b, v in pieces if b > stop]
    return joined([*kept, *values, *after])


def joined(pieces: Sequence[tuple[int, int, int | None]]) -> Pieces:
    """Joins neighbours of equal value into one interval; unknown values are left out."""
    found: Pieces = []
    for a, b, value in pieces:
        if value is None or a >= b:
            continue
        if found and found[-1][1] == a and found[-1][2] == value:
            found[-1] = (found[-1][0], b, value)
        else:
            found.append((a, b, value))
    return found


def lacking(pieces: Sequence[tuple[int, int, int | None]], start: int, stop: int, value: int) -> int:
    """The first element of an interval that does not have this value; -1 if all have it."""
    at = start
    for a, b, found in cut(pieces, start, stop):
        if a > at or found != value:
            return at if a > at else a
        at = b
    return at if at < stop else -1


def value_at(pieces: Sequence[tuple[int, int, int | None]], element: int) -> int | None:
    """The value of one element."""
    return next((v for a, b, v in pieces if a <= element < b), None)


def breaks(buffers: Sequence[Pieces], start: int, stop: int) -> list[int]:
    """The ends of an interval, and the elements inside it at which the value of any buffer changes."""
    inner = {edge for pieces in buffers for a, b, _ in pieces for edge in (a, b) if start < edge < stop}
    return [start, *sorted(inner), stop]


# ---- sums

Leaf = tuple[int, int, int]
"""Data rank, tensor rank (0 if each has the whole gradient), microbatch."""


class Sums:
    """All sums so far, by number.  None is memory that was never written."""

    def __init__(self) -> None:
        self._numbers: dict[Leaf | tuple[int, int], int] = {}
        self._terms: list[Leaf | tuple[int, int]] = []

    def leaf(self, part: int, tensor: int, microbatch: int) -> int:
        return self._number((part, tensor, microbatch))

    def add(self, one: int | None, other: int | None) -> int | None:
        """The number of a sum; unknown if either term is."""
        return None if one is None or other is None else self._number((one, other))

    def gathered(self, parts: Iterable[int], microbatch: int) -> int | None:
        """The sum over the parts of the batch whose tokens go to the same experts."""
        return self.collective([self.leaf(part, 0, microbatch) for part in parts], (1,))

    def _number(self, term: Leaf | tuple[int, int]) -> int:
        found = self._numbers.get(term)
        if found is None:
            found = self._numbers[term] = len(self._terms)
            self._terms.append(term)
        return found

    def collective(self, members: Sequence[int | None], sizes: Sequence[int]) -> int | None:
        """The sum over a group in the order of ``comm.ordered_reduce``: the first axis is folded first.

        Args:
            members: the members' terms in group order, the first axis outermost.
            sizes: the sizes of the axes.
        """
        if len(sizes) > 1:
            last = sizes[-1]
            members = [self.collective(members[k::last], sizes[:-1]) for k in range(last)]
        total = members[0]
        for member in members[1:]:
            total = self.add(total, member)
        return total

    def leaves(self, number: int) -> Counter[Leaf]:
        """Counts how often each sample is in a sum."""
        times: Counter[int] = Counter({number: 1})
        found: Counter[Leaf] = Counter()
        for n in range(number, -1, -1):  # a term has a smaller number than its sum
            if not times[n]:
                continue
            term = self._terms[n]
            if len(term) == 3:
                found[term] += times[n]
            else:
                for part in term:
                    times[part] += times[n]
        return found

    def compared(self, found: int | None, expected: int, context: int = 1) -> str:
        """Describes the error of a sum; empty if it is right."""
        if found == expected:
            return ""
        if found is None:
            return "it is not a sum: part of it was never written, or is the remainder of a reduction"
        has, due = self.leaves(found), self.leaves(expected)
        for leaf in sorted(has.keys() | due.keys()):
            if has[leaf] != due[leaf]:
                share = f", share of tensor rank {leaf[1]}" if any(one[1] for one in due) else ""
                sample = f"microbatch {leaf[2]} of {part_name(leaf[0], context)}{share}"
                return f"{sample} is in it {times_of(has[leaf])} (due: {times_of(due[leaf])})"
        return f"{ANOTHER_ORDER} than the row's, so its last bits differ"


ANOTHER_ORDER = "every sample is in it once, but they are added in another order"


def part_name(part: int, context: int) -> str:
    """Names a part of the batch: a data rank, and under a context axis the rank's place on it."""
    data_rank, place = divmod(part, context)
    return f"data rank {data_rank}" + f", part {place} of its time," * (context > 1)


def times_of(number: int) -> str:
    """ "not at all", "once", "3 times"."""
    return {0: "not at all", 1: "once", 2: "twice"}.get(number, f"{number} times")


def promised(
    sums: Sums, strategy: Strategy, mesh: Mesh, microbatches: Sequence[int], *, summed: bool, axes: StateAxes = DENSE
) -> int:
    """The sum that a row makes of a gradient.

    Args:
        microbatches: in the order in which the schedule adds them.
        summed: the gradient is pending over the tensor axis, which the step sums first.
        axes: the axes over which the state is kept; experts get tokens from every rank of the expert axis.
    """
    order = axes.of(additions(strategy))
    if summed:
        after = order.index(MICROBATCH) + 1
        order = (*order[:after], "tensor", *order[after:])
    sizes = {axis: mesh.axis(axis) for axis in order if axis != MICROBATCH} | {MICROBATCH: len(microbatches)}

    def leaf(at: dict[str, int]) -> int | None:
        if axes == EXPERTS:
            first = at["replica"] * mesh.shard + at["expert_shard"] * mesh.expert
            return sums.gathered(range(first, first + mesh.expert), microbatches[at[MICROBATCH]])
        part = at["replica"] * mesh.shard + at["shard"]
        return sums.leaf(part, at.get("tensor", 0), microbatches[at[MICROBATCH]])

    total = fold(order, sizes, leaf, sums.add)
    assert total is not None
    return total


# ---- collectives, and owners


def left_behind(op: Op, contents: Sequence[Pieces], sizes: Sequence[int], sums: Sums) -> list[Pieces]:
    """Returns the buffers of a group after one collective.

    Args:
        contents: the buffers before it, in group order.
        sizes: the sizes of the axes.
    """
    start, stop, n = op.start, op.stop, len(contents)
    ends = [start + k * (stop - start) // n for k in range(n + 1)]
    values: list[Pieces]
    if op.kind == "all_gather":
        pieces = [piece for c, (a, b) in zip(contents, pairwise(ends), strict=True) for piece in cut(c, a, b)]
        values = [write([], start, stop, pieces)] * n
    elif op.kind == "broadcast":
        values = [cut(contents[op.root], start, stop)] * n
    else:
        total = [
            (a, b, sums.collective([value_at(content, a) for content in contents], sizes))
            for a, b in pairwise(breaks(contents, start, stop))
        ]
        if op.kind == "reduce_scatter":
            values = [cut(total, a, b) for a, b in pairwise(ends)]
        else:
            values = [total if op.kind == "all_reduce" or k == op.root else [] for k in range(n)]
    return [write(content, start, stop, mine) for content, mine in zip(contents, values, strict=True)]


def added(one: Pieces, other: Pieces, sums: Sums) -> Pieces:
    """The sum of two buffers; it is unknown wherever either of them is."""
    if not one or not other:
        return []
    if len(one) == 1 and len(other) == 1 and one[0][:2] == other[0][:2]:
        return [(*one[0][:2], sums.add(one[0][2], other[0][2]))]
    found: Pieces = []
    for a, b in pairwise(breaks([one, other], min(one[0][0], other[0][0]), max(one[-1][1], other[-1][1]))):
        found = write(found, a, b, [(a, b, sums.add(value_at(one, a), value_at(other, a)))])
    return found


def misowned(
    updates: Sequence[tuple[int, int, int]], mesh: Mesh, owned_by: Sequence[str], numel: Mapping[int, int]
) -> tuple[int, int, str] | None:
    """Finds a rank, an element, and the error in its ownership; None if each element has one owner in each group.

    Args:
        updates: the rank and the interval of each update.
        owned_by: the axes of a group, over which the optimizer's cell is cut.
        numel: the buffer's number of elements by rank: tensor ranks may have more or fewer.
    """
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    axes = AXES_OF_EXPERTS if "expert_shard" in owned_by else AXES
    for rank, start, stop in updates:
        place = tuple(mesh.coordinate(rank, axis) for axis in axes if axis not in owned_by)
        groups[place].append((start, stop, rank))
    for owned in groups.values():
        end = 0
        for start, stop, rank in sorted(owned):
            if start < stop and start != end:
                return rank, min(start, end), "it has two owners" if start < end else "it has no owner"
            end = max(end, stop)
        if end != numel[owned[0][2]]:
            return owned[0][2], end, "it has no owner"
    return None
