"""The same samples on smaller layouts: a factor that grows with a size says which size is to blame.

mesh "tensor=4", microbatches 2      tensor 1, 2, 4  x  microbatches 1, 2

factors  1, 2, 4 | 1, 2, 4           as the tensor axis
         1, 1, 1 | 2, 2, 2           as the microbatches
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.referee.difference import factor_text
from plait.table.mesh import AXES, Mesh

FEW = 3
"""Up to this size an axis has every size below it too; a larger one its divisors."""
POWERS = (0, 1, -1, 2, -2)
NEAR = 1e-2
MICROBATCHES = "microbatches"
RANKS = "ranks"
"""Of a loop that was witnessed, whose mesh nobody tells."""


@dataclass(frozen=True)
class GridCell:
    """A layout of the grid: the sizes of axes, and ``microbatches``, by name."""

    sizes: Mapping[str, int]

    @property
    def mesh(self) -> str:
        """As the flag takes it; one rank has an axis too."""
        axes = {axis: size for axis, size in self.sizes.items() if axis != MICROBATCHES}
        return " ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or f"{next(iter(axes))}=1"

    def __str__(self) -> str:
        return f"{self.mesh}, microbatches={self.sizes[MICROBATCHES]}"


def cells_up_to(mesh: Mesh, microbatches: int) -> tuple[GridCell, ...]:
    """The layouts from one rank and one microbatch to this one, smallest first."""
    axes = [axis for axis in AXES if mesh.axis(axis) > 1] or ["shard"]
    choices = [_below(mesh.axis(axis)) for axis in axes] + [_below(microbatches)]
    found = (GridCell(dict(zip([*axes, MICROBATCHES], sizes, strict=True))) for sizes in itertools.product(*choices))
    return tuple(sorted(found, key=lambda cell: (Mesh.parse(cell.mesh).size, cell.sizes[MICROBATCHES])))


def growth(cells: Sequence[GridCell], factors: Sequence[float | None]) -> str:
    """How factors depend on the sizes; empty where everything is equal (1 everywhere).

    Args:
        factors: observed / true of each cell; 1 where it is equal, None where it is different without a factor.
    """
    if all(factor == 1 for factor in factors):
        return ""
    wrong = [str(cell) for cell, factor in zip(cells, factors, strict=True) if factor != 1]
    known = [(cell.sizes, factor) for cell, factor in zip(cells, factors, strict=True) if factor is not None]
    if len(known) < len(cells):
        return f"different on {len(wrong)} of {len(cells)} layouts, not by a factor: first on {wrong[0]}"
    names = list(cells[0].sizes)
    told = ", ".join(f"{factor_text(f)} where {_where(sizes)}" for sizes, f in known if f != 1)
    for powers in sorted(itertools.product(POWERS, repeat=len(names)), key=lambda p: sum(map(abs, p))):
        law = [_value(sizes, names, powers) for sizes, _ in known]
        if all(abs(f / value - 1) <= NEAR for (_, f), value in zip(known, law, strict=True)):
            return f"the factor is {told}: it grows {_words(names, powers)}"
    if len({round(f, 4) for _, f in known}) == 1:
        return f"the factor is {factor_text(known[0][1])} on every layout: it depends on no size"
    return f"the factor is {told}: it follows no product of the sizes"


def told_factor(factor: float | None, *, equal: bool) -> float | None:
    """What a cell has to say of growth: 1 where it is equal, and None where it is different without a factor; what
    counts some samples once, and others not, has no factor of the whole."""
    if equal:
        return 1.0
    return None if factor is None or abs(factor - 1) <= NEAR else factor


def _below(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size <= FEW or size % n == 0]


def _value(sizes: Mapping[str, int], names: Sequence[str], powers: Sequence[int]) -> float:
    product = 1.0
    for name, power in zip(names, powers, strict=True):
        product *= float(sizes[name]) ** power
    return product


def _where(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "there is one rank"


def _words(names: Sequence[str], powers: Sequence[int]) -> str:
    words = []
    for name, power in zip(names, powers, strict=True):
        if power:
            what = f"the number of {name}" if name in (MICROBATCHES, RANKS) else f"the {name} axis"
            square = " squared" if abs(power) == 2 else ""
            words.append(f"{'as' if power > 0 else 'as one over'} {what}{square}")
    return " and ".join(words)
