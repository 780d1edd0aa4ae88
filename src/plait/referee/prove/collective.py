"""The buffers of a group after a collective, and the owners of elements.

all_gather, broadcast     the pieces of the members, or the root's, on each
reduce_scatter, reduce    the sum on each its piece, or on the root; elsewhere the values are unknown
all_reduce                the sum on each
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from plait.referee.prove.pieces import Pieces, breaks, cut, value_at, write
from plait.referee.prove.program import Op
from plait.referee.prove.sums import Sums
from plait.table.mesh import Mesh


def left_behind(op: Op, contents: Sequence[Pieces], sizes: Sequence[int], sums: Sums) -> list[Pieces]:
    """Returns the buffers of a group after one collective.

    Args:
        contents: the buffers before, in group order.
        sizes: of the axes.
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
    """The sum of two buffers; where only one of them is known, it is not."""
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
    """Finds a rank, an element, and an error in its owners; None where each element has one owner in each group.

    Args:
        updates: the rank and the interval of each.
        owned_by: the axes of such a group, over which the optimizer's cell is cut.
        numel: elements of the buffer, by rank: tensor ranks may have more or fewer.
    """
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, start, stop in updates:
        place = tuple(index for axis, index in mesh.coordinates(rank).items() if axis not in owned_by)
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
