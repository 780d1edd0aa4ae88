"""Cuts of a tensor of any number of dims over the axes of a mesh, and the way from one cut to another.

A layout gives, for each *dim* of the tensor, the *axes* of the mesh that cut it (outermost cut first), and the axes
over which a sum is still pending; over every other axis the tensor is replicated.  Each dim is a word (any will do):

    "out/tensor in"                     dim 0 cut over tensor           tensor=Shard(0) replica=Replicate
    "out in, pending(replica)"          a sum over replica is due       tensor=Replicate replica=Partial(sum)
    "batch/replica/shard time"          dim 0 cut over replica, each piece cut again over shard

    5 rows over tensor=4      5 rows over replica=2, then tensor=2
    0 1 | 2 3 | 4 |           0 1 | 2 || 3 | 4            uneven and empty pieces are normal

Each axis does one thing in a step from layout to layout, by one collective (``path``):

    from \\ to   cut dim e                pending                  replicated
    cut dim d   all_to_all               place (zeros around it)  all_gather
    pending     reduce_scatter           -                        all_reduce
    replicated  slice                    keep_first               -

``place``, ``keep_first`` and ``slice`` send nothing.  Pieces of unequal size are padded to the largest one, and
the bytes of a step count the padding.  An axis of size 1 changes nothing and costs nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from plait.table.collectives import Entry, Note, bytes_sent
from plait.table.mesh import AXES, Mesh
from plait.table.region import Region, extent, part


def nested_part(size: int, ways: tuple[int, ...], indices: tuple[int, ...]) -> tuple[int, int]:
    """The start and stop of a rank's piece when each piece is cut again, the first cut outermost."""
    start, stop = 0, size
    for n, index in zip(ways, indices, strict=True):
        low, high = part(stop - start, n, index)
        start, stop = start + low, start + high
    return start, stop


@dataclass(frozen=True)
class Layout:
    """For each dim, the axes that cut it, outermost first, and the axes over which a sum is pending.

    Raises:
        ValueError: an axis is unknown, or occurs twice.
    """

    dims: tuple[tuple[str, ...], ...]
    pending: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for axis in (*self.cut, *self.pending):
            if axis not in AXES:
                raise ValueError(f"layout '{self}' names {axis!r}: the mesh axes are {', '.join(AXES)}")
            if axis in seen:
                raise ValueError(f"layout '{self}' names {axis!r} twice: an axis cuts one dim, or is pending")
            seen.add(axis)
        object.__setattr__(self, "pending", tuple(a for a in AXES if a in self.pending))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parses ``"out/tensor in, pending(replica)"``; a tensor without dims is ``"scalar"``."""
        match = re.fullmatch(r"\s*([\w/\s]*?)\s*(?:,\s*pending\(([\w,\s]*)\))?\s*", text)
        words = match[1].split() if match else []
        if match is None or any(not piece for word in words for piece in word.split("/")):
            raise ValueError(
                f"cannot read the layout {text!r}: write a word per dim, each with the axes that cut it, as in "
                f"'out/tensor in' or 'batch/replica/shard time, pending(tensor)'; 'scalar' has no dims"
            )
        dims = () if words in ([], ["scalar"]) else tuple(tuple(word.split("/")[1:]) for word in words)
        return cls(dims, tuple((match[2] or "").replace(",", " ").split()))

    @classmethod
    def replicated(cls, num_dims: int) -> Layout:
        """Returns the layout with the whole tensor on every rank."""
        return cls(((),) * num_dims)

    def __str__(self) -> str:
        words = " ".join("/".join((f"d{d}", *axes)) for d, axes in enumerate(self.dims)) or "scalar"
        return f"{words}, pending({', '.join(self.pending)})" if self.pending else words

    @property
    def cut(self) -> tuple[str, ...]:
        """Every axis that cuts a dim."""
        return tuple(axis for axes in self.dims for axis in axes)

    def placements(self, mesh: Mesh) -> dict[str, str]:
        """Maps each axis of the mesh to its placement, in the usual words: Shard(dim), Partial(sum) or Replicate."""
        words = {axis: f"Shard({d})" for d, axes in enumerate(self.dims) for axis in axes}
        words |= dict.fromkeys(self.pending, "Partial(sum)")
        return {a: words.get(a, "Replicate") for a in AXES if mesh.axis(a) > 1}

    def on(self, mesh: Mesh) -> Layout:
        """Returns the same layout without the axes of size 1."""
        big = {a for a in AXES if mesh.axis(a) > 1}
        dims = tuple(tuple(a for a in axes if a in big) for axes in self.dims)
        return Layout(dims, tuple(a for a in self.pending if a in big))

    def dual(self, mesh: Mesh) -> Layout:
        """Returns the layout of the gradient: cut stays cut, replicated becomes pending, pending becomes replicated."""
        return Layout(self.dims, tuple(a for a in AXES if a not in (*self.cut, *self.pending))).on(mesh)


def region(layout: Layout, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Region:
    """Returns a rank's box of a tensor of this shape; raises ValueError if the layout has another number of dims."""
    if len(layout.dims) != len(shape):
        raise ValueError(
            f"layout '{layout}' has {len(layout.dims)} dims, the shape {tuple(shape)} has {len(shape)}: "
            f"write a word for each of the {len(shape)} dims"
        )
    here = mesh.coordinates(rank)
    return tuple(
        nested_part(size, tuple(map(mesh.axis, axes)), tuple(here[a] for a in axes))
        for size, axes in zip(shape, layout.dims, strict=True)
    )


# ---- from layout to layout ------------------------------------------------------------------------------------------

DUAL_KIND = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "slice": "place",
    "place": "slice",
    "keep_first": "keep_first",
}
"""Maps each step to the gradient's step: its transpose, from the dual of ``after`` to the dual of ``before``."""

FREE = ("slice", "place", "keep_first")
"""Steps that send nothing."""


@dataclass(frozen=True)
class Step:
    """One collective, or a step that sends nothing, from one layout to another.

    ``axes`` leave dim ``source`` (all_gather, place, all_to_all) and come to dim ``target`` (reduce_scatter, slice,
    all_to_all); -1 if there is none.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    source: int = -1
    target: int = -1

    def __str__(self) -> str:
        leaves = f" {'of' if self.target < 0 else 'from'} dim {self.source}" if self.source >= 0 else ""
        comes = f" to dim {self.target}" if self.target >= 0 else ""
        return f"{self.kind} over {', '.join(self.axes)}{leaves}{comes}"

    def dual(self, mesh: Mesh) -> Step:
        """Returns the gradient's step, from the dual of ``after`` to the dual of ``before``."""
        kind, before, after = DUAL_KIND[self.kind], self.after.dual(mesh), self.before.dual(mesh)
        return Step(kind, self.axes, before, after, source=self.target, target=self.source)


@lru_cache(maxsize=4096)
def path(start: Layout, end: Layout, mesh: Mesh) -> tuple[Step, ...]:
    """Returns the steps between layouts of equally many dims (ValueError if not), the shrinking ones first."""
    if len(start.dims) != len(end.dims):
        raise ValueError(f"'{start}' has {len(start.dims)} dims and '{end}' {len(end.dims)}: give a word for each dim")
    here, end = start.on(mesh), end.on(mesh)
    steps: list[Step] = []
    while here != end:
        step = _shrink(here, end) or _sum(here, end) or _grow(here, end) or _keep_first(here, end)
        assert step is not None, f"no way from {here} to {end}"
        last = steps[-1] if steps else None
        if last and (last.kind, last.source, last.target) == (step.kind, step.source, step.target):
            if step.kind in ("slice", "reduce_scatter"):
                step = replace(step, axes=last.axes + step.axes, before=steps.pop().before)
            elif step.kind in ("all_gather", "place"):
                step = replace(step, axes=step.axes + last.axes, before=steps.pop().before)
        steps.append(step)
        here = step.after
    return tuple(steps)


def _with(layout: Layout, dims: dict[int, tuple[str, ...]], pending: tuple[str, ...]) -> Layout:
    return Layout(tuple(dims.get(d, axes) for d, axes in enumerate(layout.dims)), pending)


def _shrink(here: Layout, end: Layout) -> Step | None:
    """Returns the next cut that a dim needs, if nothing has to be undone before."""
    exchange: Step | None = None
    for d, (now, then) in enumerate(zip(here.dims, end.dims, strict=True)):
        if now == then or then[: len(now)] != now:
            continue
        axis = then[len(now)]
        if axis not in here.cut:
            after = _with(here, {d: (*now, axis)}, tuple(a for a in here.pending if a != axis))
            return Step("reduce_scatter" if axis in here.pending else "slice", (axis,), here, after, target=d)
        source, axes = next((e, axes) for e, axes in enumerate(here.dims) if axis in axes)
        run = axes[axes.index(axis) :]  # everything that would have to move along
        if exchange is None and then[len(now) : len(now) + len(run)] == run:
            after = _with(here, {d: now + run, source: axes[: -len(run)]}, here.pending)
            exchange = Step("all_to_all", run, here, after, source, d)
    return exchange


def _sum(here: Layout, end: Layout) -> Step | None:
    left = tuple(a for a in here.pending if a in (*end.pending, *end.cut))
    due = tuple(a for a in here.pending if a not in left)
    return Step("all_reduce", due, here, replace(here, pending=left)) if due else None


def _grow(here: Layout, end: Layout) -> Step | None:
    """Undoes the innermost cut of a dim whose cuts are not a prefix of those that it needs."""
    for d, (now, then) in enumerate(zip(here.dims, end.dims, strict=True)):
        if now and then[: len(now)] != now:
            axis = now[-1]
            kind, new = ("place", (axis,)) if axis in end.pending else ("all_gather", ())
            return Step(kind, (axis,), here, _with(here, {d: now[:-1]}, here.pending + new), source=d)
    return None


def _keep_first(here: Layout, end: Layout) -> Step | None:
    new = tuple(a for a in end.pending if a not in here.pending)
    return Step("keep_first", new, here, replace(here, pending=here.pending + new)) if new else None


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step on one rank; ``whole`` is the number of elements of the collective's array, padding included.

    ``after`` is the shape of the rank's piece afterwards.  ``lengths`` are the lengths of the pieces of the assembled
    or cut dim, in group order, the longest first; ``lengths_to`` are those of the dim that an all_to_all cuts.
    """

    whole: int
    after: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    lengths_to: tuple[int, ...] = ()


def _lengths(size: int, ways: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of the pieces of a dim that is cut in several ways, the first outermost."""
    spans = (nested_part(size, ways, indices) for indices in product(*map(range, ways)))
    return tuple(stop - start for start, stop in spans)


@lru_cache(maxsize=4096)
def sizes(step: Step, shape: tuple[int, ...], mesh: Mesh, rank: int) -> StepSizes:
    """Returns the pieces and the padded size of one step on one rank."""
    local, after = (extent(region(layout, shape, mesh, rank)) for layout in (step.before, step.after))
    ways, n = tuple(map(mesh.axis, step.axes)), mesh.count(step.axes)
    if step.kind in ("all_reduce", "keep_first"):
        return StepSizes(math.prod(local), after)
    others = math.prod(s for d, s in enumerate(local) if d not in (step.source, step.target))
    if step.kind == "all_to_all":
        lengths, lengths_to = _lengths(after[step.source], ways), _lengths(local[step.target], ways)
        return StepSizes(n * lengths[0] * lengths_to[0] * others, after, lengths, lengths_to)
    dim = max(step.source, step.target)
    lengths = _lengths(max(after[dim], local[dim]), ways)
    return StepSizes(n * lengths[0] * others, after, lengths)


def entries(
    steps: tuple[Step, ...], shape: tuple[int, ...], mesh: Mesh, rank: int, itemsize: int, note: Note
) -> Iterator[Entry]:
    """Returns the lines that these steps write into a rank's ledger.  An array without elements is not sent."""
    for step in steps:
        size = sizes(step, shape, mesh, rank).whole * itemsize if step.kind not in FREE else 0
        if size:
            yield Entry(step.kind, step.axes, size, bytes_sent(step.kind, size, mesh.count(step.axes)), note)
