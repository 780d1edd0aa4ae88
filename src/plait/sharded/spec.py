"""A rank's knowledge about a sharded tensor, without its values: global shape, layout, and its own box.

    SpecCache   one per comm: every spec of that comm, once
    Spec        (shape, layout, dtype) on this rank; equal specs are one object, compared by address
    OpPlan      a rule's decision: the specs of the results, and the computation on local pieces

Rules work on specs alone, so their decisions are kept with the first operand's spec and computed once.

A comm's cache must live as long as the comm and be found from it, and no process-wide table may hold it.  So it is on
the comm itself, under ``comm.__dict__["_spec_cache"]``: only ``spec_cache`` below reads or writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm import Comm
from plait.sharded.layout import Layout, path, region
from plait.table.region import extent


class SpecCache:
    """The specs of one comm."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._specs: dict[tuple[Layout, tuple[int, ...], torch.dtype], Spec] = {}

    def spec(self, layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        """Returns the one spec of a layout, a global shape and a dtype."""
        key = (layout, tuple(shape), dtype)
        spec = self._specs.get(key)
        if spec is None:
            small = (layout.on(self.comm.mesh), key[1], dtype)
            spec = self._specs.get(small) or Spec(self, *small)
            self._specs[key] = self._specs[small] = spec
        return spec

    def replicated(self, like: Tensor) -> Spec:
        """Returns the spec of a plain tensor, which is whole on every rank."""
        return self.spec(Layout.replicated(like.dim()), like.shape, like.dtype)


def spec_cache(comm: Comm) -> SpecCache:
    """Returns the specs of a comm; the first call creates them."""
    cache: SpecCache | None = comm.__dict__.get("_spec_cache")
    if cache is None:
        cache = comm.__dict__["_spec_cache"] = SpecCache(comm)
    return cache


class Spec:
    """A global shape, a layout and a dtype, seen from one rank.  Only ``SpecCache.spec`` creates it."""

    __slots__ = ("_dual", "cache", "dtype", "layout", "local_shape", "op_plans", "shape", "start")

    def __init__(self, cache: SpecCache, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        box = region(layout, shape, cache.comm.mesh, cache.comm.rank)
        self.cache, self.layout, self.shape, self.dtype = cache, layout, torch.Size(shape), dtype
        self.start, self.local_shape = tuple(start for start, _ in box), torch.Size(extent(box))
        self.op_plans: dict[Any, OpPlan] = {}
        self._dual: Spec | None = None

    @property
    def comm(self) -> Comm:
        """This rank's access to the others."""
        return self.cache.comm

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes that cut each dim."""
        return self.layout.dims

    @property
    def pending(self) -> tuple[str, ...]:
        """The axes over which a sum is pending."""
        return self.layout.pending

    @property
    def whole(self) -> bool:
        """True if every rank has the whole tensor."""
        return not self.layout.cut and not self.layout.pending

    @property
    def dual(self) -> Spec:
        """The spec of the gradient."""
        if self._dual is None:
            self._dual = self.cache.spec(self.layout.dual(self.comm.mesh), self.shape, self.dtype)
        return self._dual

    def of(self, dtype: torch.dtype) -> Spec:
        """Returns the same cut for a tensor of another dtype."""
        return self.cache.spec(self.layout, self.shape, dtype)

    def with_layout(self, dims: Sequence[tuple[str, ...]], pending: Sequence[str] = ()) -> Spec:
        """Returns the spec of the same tensor in another layout."""
        return self.cache.spec(Layout(tuple(dims), tuple(pending)), self.shape, self.dtype)

    def new(self, shape: Sequence[int], dims: Sequence[tuple[str, ...]], pending: Sequence[str] = ()) -> Spec:
        """Returns the spec of another tensor of the comm; a result later takes its real dtype."""
        return self.cache.spec(Layout(tuple(dims), tuple(pending)), shape, self.dtype)

    def __repr__(self) -> str:
        return f"{list(self.shape)} '{self.layout}'"


class OpPlan(NamedTuple):
    """``out``: the spec of the result, or of each tensor in it; ``run``: computes on local pieces.

    ``out`` is None for a result that is no tensor, or stays as it is; it is the cache for whole results of any shape.

    Without ``run`` the function itself computes on the pieces.
    """

    out: Spec | tuple[Spec, ...] | SpecCache | None
    run: Callable[..., Any] | None = None


class Refusal(Exception):  # noqa: N818 - from a rule to the dispatcher, which makes it a LayoutError
    """Raised by a rule that would have to communicate: the reason, and layouts with which it would not."""

    def __init__(self, why: str, fix: Sequence[tuple[Spec, Layout]] = (), hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint
        self.fix = {spec: layout.on(spec.comm.mesh) for spec, layout in fix}
        self.fix = {spec: layout for spec, layout in self.fix.items() if layout != spec.layout}

    def advice(self) -> str:
        """Returns the lines with which the user may resolve it."""
        words = []
        for spec, layout in self.fix.items():
            steps = "; ".join(map(str, path(spec.layout, layout, spec.comm.mesh)))
            words.append(f"call .redistribute('{layout}') on the operand {spec!r} ({steps})")
        return " ".join(filter(None, [self.hint, "; ".join(words)]))
