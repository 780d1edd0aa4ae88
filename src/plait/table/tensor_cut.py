"""The cut of a parameter under tensor parallelism: along one dim, before the parameter is laid in its unit.

    weight [8, 4], column-cut, tensor=2             one part: a run of rows on each rank
        rank 0   rows 0..3
        rank 1   rows 4..7

    fused q|k|v, 4|2|2 heads of 2 rows, tensor=2    several parts: each is cut by itself
        rank 0   rows 0..3   8..9   12..13
        rank 1   rows 4..7  10..11  14..15

A *grain* is a group of rows that stay together (those of an attention head); the number of grains must be a multiple
of the ranks.  Without a grain any size may be cut: 5 rows over 4 ranks are 2, 2, 1, 0.
"""

from dataclasses import dataclass

from plait.table.region import Region, part


@dataclass(frozen=True)
class TensorCut:
    """One parameter's cut; ValueError for parts that don't add up, or grains that the ranks cannot share evenly."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    dim: int
    """The dim that is cut."""
    ways: int
    """The number of ranks that share it."""
    parts: tuple[int, ...]
    """Sizes of the parts of ``dim``, each cut by itself."""
    grain: int = 1
    """Elements of ``dim`` that stay together."""

    def __post_init__(self) -> None:
        size = self.shape[self.dim]
        if sum(self.parts) != size:
            raise ValueError(f"the parts {'|'.join(map(str, self.parts))} add up to {sum(self.parts)}, not to {size}")
        for size in self.parts if self.grain > 1 else ():
            heads, rest = divmod(size, self.grain)
            if rest:
                raise ValueError(f"a part of {size} is no multiple of {self.grain}, the size of a head")
            if heads % self.ways:
                fits = [n for n in range(2, heads + 1) if all(p // self.grain % n == 0 for p in self.parts)]
                instead = f"tensor={' or '.join(map(str, fits))}" if fits else "no tensor axis"
                raise ValueError(
                    f"{heads} heads of {self.grain} cannot be shared by tensor={self.ways} ranks, and a head cannot be "
                    f"parted: use {instead}, or make the number of heads a multiple of {self.ways}"
                )

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges of ``dim`` that rank ``index`` has: one run per part, in global coordinates."""
        runs, base = [], 0
        for size in self.parts:
            start, stop = part(size // self.grain, self.ways, index)
            runs.append((base + start * self.grain, base + stop * self.grain))
            base += size
        return tuple(runs)

    def local_shape(self, index: int) -> tuple[int, ...]:
        """Returns the shape of the piece that rank ``index`` has."""
        size = sum(stop - start for start, stop in self.ranges(index))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def regions(self, index: int, local: Region) -> tuple[Region, ...]:
        """Maps a region of rank ``index``'s piece to regions of the whole parameter, end to end along ``dim``."""
        low, high = local[self.dim]
        found, base = [], 0
        for start, stop in self.ranges(index):
            first, last = (start + min(max(at - base, 0), stop - start) for at in (low, high))
            base += stop - start
            if first < last:
                found.append((*local[: self.dim], (first, last), *local[self.dim + 1 :]))
        return tuple(found)
