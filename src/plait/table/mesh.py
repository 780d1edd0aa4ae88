"""A mesh is an n-dimensional grid of ranks whose axes have names.

Outermost first they are ``pipe, replica, shard, tensor``; ``replica`` and ``shard`` together are the *data* axes.

    Mesh.parse("replica=2 shard=3")          shard=0  shard=1  shard=2
                                  replica=0      0        1        2
                                  replica=1      3        4        5

The *group* of a rank over some axes is every rank that shares its other coordinates.  Groups are ordered by
coordinates, the first axis named outermost, so rank 4 (replica 1, shard 1) has

    group(4, ("shard",))            -> (3, 4, 5)
    group(4, ("replica",))          -> (1, 4)
    group(4, ("shard", "replica"))  -> (0, 3, 1, 4, 2, 5)     the k-th has piece k of a shard/replica cut

``context=2`` takes no extra ranks.  It borrows neighbours of ``shard``, which read the same samples, each a part
of their time (``tensor/time_axis.py``); their group is named ``context``.

Ranks may be on several hosts, equally many on each, one host after the other.  With ``hosts=2`` here, a host has
one replica: groups over ``shard`` are inside of a host, and groups over ``replica`` cross hosts.
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


MOST_RANKS = 1 << 20
"""Most ranks of a mesh, on all hosts together."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes, and the number of hosts; each defaults to 1."""

    pipe: int = 1
    replica: int = 1
    shard: int = 1
    tensor: int = 1
    hosts: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis!r} has size {size!r}: sizes are whole numbers from 1")
        if not isinstance(self.context, int) or self.context < 1 or self.shard % self.context:
            raise ValueError(
                f"context={self.context} borrows neighbours of shard={self.shard}: give a number that divides it"
            )
        if self.size > MOST_RANKS:
            raise ValueError(f"a mesh of more than {MOST_RANKS:,} ranks: give smaller axes")
        if not isinstance(self.hosts, int) or self.hosts < 1 or self.size % self.hosts:
            raise ValueError(f"{self.size} ranks on hosts={self.hosts}: give a number of hosts that divides them")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parses ``"replica=2 shard=2"`` or ``"replica=2 shard=2 hosts=2"``, spaces or commas between; ValueError for
        any other text."""
        sizes: dict[str, int] = {}
        for word in text.replace(",", " ").split():
            axis, equals, size = word.partition("=")
            if axis not in (*AXES, "context", "hosts"):
                known = f"the axes are {', '.join(AXES)}, and context, which borrows ranks of shard"
                raise ValueError(f"unknown mesh axis {axis!r} in {text!r}: {known}; hosts=N says on how many hosts")
            if axis in sizes:
                raise ValueError(f"mesh axis {axis!r} stands twice in {text!r}")
            if not equals or not (size.isascii() and size.isdecimal()) or len(size) > 9 or int(size) < 1:
                raise ValueError(f"mesh axis {word!r} in {text!r} needs a size from 1 to 999,999,999, as in {axis}=2")
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        """The axes larger than 1, in the form that ``parse`` reads."""
        axes = " ".join(f"{a}={self.axis(a)}" for a in AXES if self.axis(a) > 1) or "shard=1"
        return axes + "".join(f" {a}={getattr(self, a)}" for a in ("context", "hosts") if getattr(self, a) > 1)

    def axis(self, name: str) -> int:
        """The size of one axis."""
        if name not in (*AXES, "context"):
            raise ValueError(f"unknown mesh axis {name!r}: the axes are {', '.join(AXES)}")
        return int(getattr(self, name))

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return self.count(AXES)

    def count(self, axes: Iterable[str]) -> int:
        """The number of ranks in a group over these axes."""
        return math.prod(self.axis(a) for a in axes)

    def crosses(self, axis: str) -> bool:
        """True if a group over this axis has ranks of several hosts."""
        if self.axis(axis) == 1:
            return False
        # from a group's first rank to one past its last, and they are aligned
        span = self.context * self.tensor if axis == "context" else self.count(AXES[AXES.index(axis) :])
        return self.size // self.hosts % span != 0

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The axes whose groups have ranks of several hosts."""
        return tuple(axis for axis in (*AXES, "context") if self.crosses(axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns a rank's coordinate on every axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on the mesh {self} of {self.size} ranks")
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipe, replica = divmod(rank, self.replica)
        return {"pipe": pipe, "replica": replica, "shard": shard, "tensor": tensor}

    def rank(self, **coordinates: int) -> int:
        """Returns the rank at the given coordinates (0 on the axes that are not named)."""
        for axis in coordinates:
            self.axis(axis)  # refuses a name that is no axis
        rank = 0
        for axis in AXES:
            at = coordinates.get(axis, 0)
            if not 0 <= at < self.axis(axis):
                raise ValueError(f"{axis}={at} is outside the mesh {self}")
            rank = rank * self.axis(axis) + at
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the ranks that share this rank's coordinates on all *other* axes, first axis outermost."""
        here = self.coordinates(rank)
        if axes == ("context",):
            first = here["shard"] - here["shard"] % self.context
            return tuple(self.rank(**{**here, "shard": first + k}) for k in range(self.context))
        return tuple(
            self.rank(**{**here, **dict(zip(axes, at, strict=True))})
            for at in product(*(range(self.axis(a)) for a in axes))
        )

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns all groups over these axes; together they have every rank once."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.size)))

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """Returns the index of a rank within its group over these axes."""
        here = self.coordinates(rank)
        if axes == ("context",):
            return here["shard"] % self.context
        index = 0
        for axis in axes:
            index = index * self.axis(axis) + here[axis]
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
