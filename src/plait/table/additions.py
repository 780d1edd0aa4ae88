"""The tree in which a layout adds its gradients.

Floating-point addition is not associative, so *which* sum comes first decides the last bits.  The order follows from
the row: after each microbatch the axes that the gradient cell splits are reduced, then the microbatches, then at the
step the axes that were pending:

    ddp, zero1                       microbatch, shard, replica        ((m0+m1) + (m0+m1)) + ...
    hsdp, psdp                       shard, microbatch, replica
    zero2, zero3, zero3_keep, hpz    shard, replica, microbatch

Every sum is a left fold in coordinate order.  A single process that replays this tree gets exactly the bits of the
layout; ``plait verify`` compares with them.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from plait.table.cells import Strategy, moves

T = TypeVar("T")

MICROBATCH = "microbatch"


def additions(strategy: Strategy) -> tuple[str, ...]:
    """Returns the order of a row's sums, innermost first: data axes and ``"microbatch"``."""
    plan = moves(strategy)
    summing = ("reduce_scatter", "all_reduce")
    early = [a for m in plan.microbatch if m.kind in summing for a in m.axes]
    late = [a for m in plan.step if m.kind in summing for a in m.axes]
    return (*early, MICROBATCH, *late)


def fold(
    order: tuple[str, ...],
    sizes: Mapping[str, int],
    leaf: Callable[[dict[str, int]], T],
    add: Callable[[T, T], T],
) -> T:
    """Sums the leaves in the given order.

    Args:
        order: the sums, innermost first, as ``additions`` gives them.
        sizes: the number of terms of each sum.
        leaf: the term at given coordinates; called once for each, in the order of the additions.
        add: the sum of two terms; it may reuse the first.
    """

    def total(depth: int, at: dict[str, int]) -> T:
        if depth == 0:
            return leaf(at)
        axis = order[depth - 1]
        result = total(depth - 1, {**at, axis: 0})
        for index in range(1, sizes[axis]):
            result = add(result, total(depth - 1, {**at, axis: index}))
        return result

    return total(len(order), {})
