"""Sums without numbers: which samples, and in which order they are added.

    leaf (d, t, m)     the samples of data rank d in microbatch m (t: the tensor rank's share, where there are shares)
    a + b              a number for each pair of terms; equal sums have equal numbers

``table.additions.fold`` makes the sum that a row promises, by the very function that the reference run of ``plait
verify`` replays; the machine makes the one that the messages bring about.  Both are numbers of one ``Sums``, so one
comparison shows that every sample is in it once, and in this order.
"""

from collections import Counter
from collections.abc import Sequence

from plait.table.additions import MICROBATCH, additions, fold
from plait.table.cells import Strategy
from plait.table.mesh import Mesh

Leaf = tuple[int, int, int]
"""Data rank, tensor rank (0 where each has the whole gradient), microbatch."""


class Sums:
    """Every sum that was made, by number.  None means memory that was never written."""

    def __init__(self) -> None:
        self._numbers: dict[Leaf | tuple[int, int], int] = {}
        self._terms: list[Leaf | tuple[int, int]] = []

    def leaf(self, data_rank: int, tensor: int, microbatch: int) -> int:
        return self._number((data_rank, tensor, microbatch))

    def add(self, one: int | None, other: int | None) -> int | None:
        """The sum of two numbers; unknown if either is."""
        return None if one is None or other is None else self._number((one, other))

    def _number(self, term: Leaf | tuple[int, int]) -> int:
        found = self._numbers.get(term)
        if found is None:
            found = self._numbers[term] = len(self._terms)
            self._terms.append(term)
        return found

    def collective(self, members: Sequence[int | None], sizes: Sequence[int]) -> int | None:
        """The sum over a group, in the order of ``comm.ordered_reduce``: the first axis is folded first.

        Args:
            members: in group order, the first axis outermost.
            sizes: of the axes.
        """
        if len(sizes) > 1:
            last = sizes[-1]
            members = [self.collective(members[k::last], sizes[:-1]) for k in range(last)]
        total = members[0]
        for member in members[1:]:
            total = self.add(total, member)
        return total

    def leaves(self, number: int) -> Counter[Leaf]:
        """Counts each sample in a sum."""
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

    def compared(self, found: int | None, expected: int) -> str:
        """Describes the error of a sum, as text; empty where it is right."""
        if found == expected:
            return ""
        if found is None:
            return "it is not a sum: part of it was never written, or is what a reduction left behind"
        has, due = self.leaves(found), self.leaves(expected)
        for leaf in sorted(has.keys() | due.keys()):
            if has[leaf] != due[leaf]:
                share = f", share of tensor rank {leaf[1]}" if any(one[1] for one in due) else ""
                sample = f"microbatch {leaf[2]} of data rank {leaf[0]}{share}"
                return f"{sample} is in it {times_of(has[leaf])} (due: {times_of(due[leaf])})"
        return f"{ANOTHER_ORDER} than the row's, so its last bits differ"


ANOTHER_ORDER = "every sample is in it once, but they are added in another order"


def times_of(number: int) -> str:
    """ "not at all", "once", "3 times"."""
    return {0: "not at all", 1: "once", 2: "twice"}.get(number, f"{number} times")


def promised(sums: Sums, strategy: Strategy, mesh: Mesh, microbatches: Sequence[int], *, summed: bool) -> int:
    """The sum that a row makes of a gradient.

    Args:
        microbatches: in the order in which the schedule adds them.
        summed: the gradient is pending over the tensor axis, which is summed first at the step.
    """
    order = additions(strategy)
    if summed:
        after = order.index(MICROBATCH) + 1
        order = (*order[:after], "tensor", *order[after:])
    sizes = {axis: mesh.axis(axis) for axis in order if axis != MICROBATCH} | {MICROBATCH: len(microbatches)}

    def leaf(at: dict[str, int]) -> int | None:
        data_rank = at["replica"] * mesh.shard + at["shard"]
        return sums.leaf(data_rank, at.get("tensor", 0), microbatches[at[MICROBATCH]])

    total = fold(order, sizes, leaf, sums.add)
    assert total is not None
    return total
