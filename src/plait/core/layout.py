"""How a tensor of any number of dims is cut over the axes of a mesh."""

from __future__ import annotations


def part(size: int, ways: int, index: int) -> tuple[int, int]:
    """Where part ``index`` of ``size`` elements cut in ``ways`` begins and ends.

    Parts are ceil(size / ways) long, the last ones shorter or empty: 5 in 4 is 2, 2, 1, 0 (as ``torch.chunk`` and
    DTensor cut).
    """
    step = -(-size // ways)
    return min(index * step, size), min((index + 1) * step, size)
