"""A mesh is an n-dimensional grid of ranks whose axes have names.

Outermost first they are ``pipe, replica, shard, tensor``; ``replica`` and ``shard`` together are the *data* axes.

    Mesh.parse("replica=2 shard=3")          shard=0  shard=1  shard=2
                                  replica=0      0        1        2
                                  replica=1      3        4        5

The *group* of a rank over some axes is the set of ranks that share its other coordinates.  Groups are ordered by
coordinates, the first axis named outermost, so rank 4 (replica 1, shard 1) has

    group(4, ("shard",))            -> (3, 4, 5)
    group(4, ("replica",))          -> (1, 4)
    group(4, ("shard", "replica"))  -> (0, 3, 1, 4, 2, 5)     the k-th has piece k of a shard/replica cut

``context=2`` and ``expert=2`` take no extra ranks: they borrow neighbours of ``shard``.  The ranks of a context group
read the same samples, each a part of their time (``tensor/time_axis.py``).  An expert group shares the experts of a
layer (``tensor/expert_axis.py``); the ranks with the same experts are a group over ``expert_shard``:

    shard          0  1  2  3
    expert         0  1  0  1            group (0, 1) has every expert once
    expert_shard   0  0  1  1            group (0, 2) has the same experts

Ranks may be on several hosts, equally many on each, one host after the other.  With ``hosts=2`` here, a host has
one replica: groups over ``shard`` stay inside a host, and groups over ``replica`` cross hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

AXES = ("pipe", "replica", "shard", "tensor")
"""Every axis a mesh may have, outermost first."""

DATA_AXES = ("shard", "replica")
"""The axes over which the batch is split, in the order in which their sums are taken."""

BORROWED = ("context", "expert")
"""Axes that a mesh may have in addition: they regroup ranks of ``shard``."""

MOST_RANKS = 1 << 20
"""The most ranks of a mesh, on all hosts together."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes, and the number of hosts; each defaults to 1."""

    pipe: int = 1
    replica: int = 1
    shard: int = 1
    tensor: int = 1
    hosts: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, *BORROWED):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis!r} has size {size!r}: sizes are whole numbers from 1")
            if axis in BORROWED and self.shard % size:
                raise ValueError(
                    f"{axis}={size} borrows neighbours of shard={self.shard}: give a number that divides it"
                )
        if self.size > MOST_RANKS:
            raise ValueError(f"a mesh of more than {MOST_RANKS:,} ranks: give smaller axes")
        if not isinstance(self.hosts, int) or self.hosts < 1 or self.size % self.hosts:
            raise ValueError(f"{self.size} ranks on hosts={self.hosts}: give a number of hosts that divides them")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parses ``"replica=2 shard=2"`` or ``"replica=2 shard=2 hosts=2"``, with spaces or commas between; raises
        ValueError for any other text."""
        sizes: dict[str, int] = {}
        for word in text.replace(",", " ").split():
            axis, equals, size = word.partition("=")
            if axis not in (*AXES, *BORROWED, "hosts"):
                known = f"the axes are {', '.join(AXES)}, and {' and '.join(BORROWED)}, which borrow ranks of shard"
                raise ValueError(f"unknown mesh axis {axis!r} in {text!r}: {known}; write shard=4, or shard=4 hosts=2")
            if axis in sizes:
                raise ValueError(f"mesh axis {axis!r} is given twice in {text!r}")
            if not equals or not (size.isascii() and size.isdecimal()) or len(size) > 9 or int(size) < 1:
                raise ValueError(f"mesh axis {word!r} in {text!r} needs a size from 1 to 999,999,999, as in {axis}=2")
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        """Returns the axes larger than 1, in the form that ``parse`` reads."""
        axes = " ".join(f"{a}={self.axis(a)}" for a in AXES if self.axis(a) > 1) or "shard=1"
        return axes + "".join(f" {a}={getattr(self, a)}" for a in (*BORROWED, "hosts") if getattr(self, a) > 1)

    @cached_property
    def _axes(self) -> dict[str, tuple[int, int]]:
        sizes = {axis: int(getattr(self, axis)) for axis in (*AXES, *BORROWED)}
        strides = {axis: math.prod(sizes[inner] for inner in AXES[place + 1 :]) for place, axis in enumerate(AXES)}
        found = {axis: (size, strides.get(axis, self.tensor)) for axis, size in sizes.items()}
        return found | {"expert_shard": (self.shard // self.expert, self.expert * self.tensor)}

    def _axis(self, name: str) -> tuple[int, int]:
        if name not in self._axes:
            raise ValueError(f"unknown mesh axis {name!r}: the axes are {', '.join(AXES)}")
        return self._axes[name]

    def axis(self, name: str) -> int:
        """The size of one axis; for ``expert_shard``, the ranks of ``shard`` that have the same experts."""
        return self._axis(name)[0]

    def stride(self, axis: str) -> int:
        """The distance between the ranks of two neighbours on an axis."""
        return self._axis(axis)[1]

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return self.count(AXES)

    def count(self, axes: Iterable[str]) -> int:
        """The number of ranks in a group over these axes."""
        return math.prod(self.axis(a) for a in axes)

    def crosses(self, axis: str) -> bool:
        """True if a group over this axis has ranks of several hosts."""
        # groups are aligned: the product spans a group's first rank to one past its last
        return self.axis(axis) > 1 and self.size // self.hosts % (self.axis(axis) * self.stride(axis)) != 0

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The axes whose groups have ranks of several hosts."""
        return tuple(axis for axis in (*AXES, *BORROWED) if self.crosses(axis))

    def coordinate(self, rank: int, axis: str) -> int:
        """Returns a rank's place on one axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on the mesh {self} of {self.size} ranks")
        return rank // self.stride(axis) % self.axis(axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns a rank's coordinate on every axis."""
        return {axis: self.coordinate(rank, axis) for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """Returns the rank at the given coordinates (0 on the axes that are not named)."""
        rank = 0
        for axis, at in coordinates.items():
            if not 0 <= at < self.axis(axis):
                raise ValueError(f"{axis}={at} is outside the mesh {self}")
            rank += at * self.stride(axis)
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the ranks that share this rank's coordinates on all *other* axes, first axis outermost."""
        first = rank - sum(self.coordinate(rank, axis) * self.stride(axis) for axis in axes)
        steps = [range(0, self.axis(axis) * self.stride(axis), self.stride(axis)) for axis in axes]
        return tuple(first + sum(at) for at in product(*steps))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns all groups over these axes; together they have every rank once."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.size)))

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """Returns the index of a rank within its group over these axes."""
        index = 0
        for axis in axes:
            index = index * self.axis(axis) + self.coordinate(rank, axis)
        return index

    @property
    def data_size(self) -> int:
        """The number of parts of the batch."""
        return self.count(DATA_AXES) // self.context

    def data_rank(self, rank: int) -> int:
        """Returns the index of the part of the batch that a rank reads: ``(replica * |shard| + shard) / context``."""
        return self.index(rank, ("replica", "shard")) // self.context


ONE_HOST = Mesh()
"""The default mesh, in which nothing crosses hosts."""
