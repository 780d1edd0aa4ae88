"""The order in which a group's values are added, as one pure function.

Floating-point addition is not associative, so "the sum over a group" is only defined together with an order.  plait's
order follows from the axes: the first axis is folded first, from left to right, then the next one.  Over
``("shard", "replica")`` of sizes 3 and 2, member ``k = s * 2 + r`` holds ``x[s][r]``:

    r = 0    (x00 + x10) + x20  --+
                                  +-->  sum
    r = 1    (x01 + x11) + x21  --+

Every world reduces by this function, and so does the reference run of ``verify``, so their bits are equal.
No fold starts from zero (``0 + -0.0`` is ``0.0``, which would lose a sign).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

OPS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
"""The reductions.  The mean is not one of them: sum, and divide once, yourself."""

BLOCK_BYTES = 512 * 1024
"""On CPUs the fold goes through the members in blocks of this many bytes, so that partial sums stay in cache."""


def ordered_sum(stack: Sequence[Tensor], sizes: Sequence[int], op: str, out: Tensor) -> None:
    """Writes the fold of ``stack`` into ``out``, in the order of the module's picture.

    Args:
        stack: one 1-D tensor per member, in group order (first axis outermost).
        sizes: the size of each axis; ValueError if they do not multiply to ``len(stack)``.
        op: ``sum``, ``min`` or ``max``.
        out: 1-D, as long as each member; it may *be* one of the members.
    """
    if math.prod(sizes) != len(stack):
        raise ValueError(f"axes of sizes {tuple(sizes)} make {math.prod(sizes)} members, not {len(stack)}")
    combine = OPS[op]
    if len(stack) == 2:  # one addition reads and writes each place once, so out may be either member
        combine(stack[0], stack[1], out=out)
        return
    sizes = tuple(n for n in sizes if n > 1)
    if not sizes:
        if out.data_ptr() != stack[0].data_ptr():
            out.copy_(stack[0])
        return
    block = max(1, BLOCK_BYTES // out.element_size()) if out.device.type == "cpu" else max(1, out.numel())
    # The sum grows in scratch, not in out, because out may be a member that is read late.
    scratch = [out.new_empty(min(block, out.numel())) for _ in sizes]
    for members in zip(*(torch.split(x, block) for x in (out, *stack)), strict=True):
        into, *spare = (s[: members[0].numel()] for s in scratch)
        _fold(members[1:], sizes, combine, into, spare)
        members[0].copy_(into)


def _fold(
    members: Sequence[Tensor],
    sizes: tuple[int, ...],
    combine: Callable[..., Tensor],
    into: Tensor,
    spare: Sequence[Tensor],
) -> None:
    """Folds with the last axis outermost: ``into = f(r=0) + f(r=1) + ...``, ``f`` folding the axes before it."""
    if len(sizes) == 1:
        combine(members[0], members[1], out=into)
        for member in members[2:]:
            combine(into, member, out=into)
        return
    last = sizes[-1]
    _fold(members[0::last], sizes[:-1], combine, into, spare)
    for r in range(1, last):
        _fold(members[r::last], sizes[:-1], combine, spare[0], spare[1:])
        combine(into, spare[0], out=into)
