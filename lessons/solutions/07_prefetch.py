"""A solution of puzzle 7: begin the next gather, compute, forget the weight."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def solve(start: Callable[[int], Any], compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    here = start(0)
    for i in range(6):
        weight = here.wait()
        here = start(i + 1) if i < 5 else None  # the handle of this layer is forgotten here
        x = compute(x, weight)
        del weight  # or it would still be in memory when the next gather begins
    return x
