"""What a rank knows of a sharded tensor without its values: global shape, layout, and the box that it holds.

    Home   one per comm: every spec of that comm, once
    Spec   (shape, layout) on this rank; equal specs are one object, so comparing them is comparing addresses
    Plan   what a rule decided: the specs of the results, and what to compute on the local pieces

Rules work on specs alone, so what they decide is kept with the first operand's spec and asked for once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from plait.comm import Comm
from plait.core.layout import Layout, path, region
from plait.core.mesh import AXES


class Home:
    """The specs of one comm.  It lies on the comm itself (``home_of``) and ends with it."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.axes = tuple(a for a in AXES if comm.mesh.axis(a) > 1)
        self._specs: dict[tuple[Layout, tuple[int, ...]], Spec] = {}

    def spec(self, layout: Layout, shape: Sequence[int]) -> Spec:
        """The one spec of a layout and a global shape."""
        key = (layout, tuple(shape))
        spec = self._specs.get(key)
        if spec is None:
            small = (layout.on(self.comm.mesh), key[1])
            spec = self._specs.get(small) or Spec(self, *small)
            self._specs[key] = self._specs[small] = spec
        return spec

    def replicated(self, shape: Sequence[int]) -> Spec:
        """The spec of a tensor that is whole on every rank."""
        return self.spec(Layout.replicated(len(shape)), shape)


def home_of(comm: Comm) -> Home:
    """The home of a comm's specs."""
    home = comm.__dict__.get("_tensor_home")
    if home is None:
        home = comm.__dict__["_tensor_home"] = Home(comm)
    return home


class Spec:
    """A global shape and a layout, seen from one rank.  Made by ``Home.spec`` only."""

    __slots__ = ("_dual", "home", "layout", "local_shape", "plans", "shape", "start")

    def __init__(self, home: Home, layout: Layout, shape: tuple[int, ...]) -> None:
        box = region(layout, shape, home.comm.mesh, home.comm.rank)
        self.home, self.layout, self.shape = home, layout, torch.Size(shape)
        self.start, self.local_shape = box.start, torch.Size(box.shape)
        self.plans: dict[Any, Plan] = {}
        self._dual: Spec | None = None

    @property
    def comm(self) -> Comm:
        """This rank's way to the others."""
        return self.home.comm

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes that cut each dim."""
        return self.layout.dims

    @property
    def pending(self) -> tuple[str, ...]:
        """The axes over which a sum is due."""
        return self.layout.pending

    @property
    def dual(self) -> Spec:
        """Where the gradient lives."""
        if self._dual is None:
            self._dual = self.home.spec(self.layout.dual(self.comm.mesh), self.shape)
        return self._dual

    def with_layout(self, dims: Sequence[tuple[str, ...]], pending: Sequence[str] = ()) -> Spec:
        """The same tensor, laid out otherwise."""
        return self.home.spec(Layout(tuple(dims), tuple(pending)), self.shape)

    def new(self, shape: Sequence[int], dims: Sequence[tuple[str, ...]], pending: Sequence[str] = ()) -> Spec:
        """Another tensor of the same comm."""
        return self.home.spec(Layout(tuple(dims), tuple(pending)), shape)

    def __repr__(self) -> str:
        return f"{list(self.shape)} '{self.layout}'"


class Plan(NamedTuple):
    """``out``: the spec of the result, a tuple of them, or None for what is no tensor; ``run``: on local pieces.

    Without ``run`` the function itself computes on the pieces.
    """

    out: Spec | tuple[Spec, ...] | None
    run: Callable[..., Any] | None = None


class Refusal(Exception):  # noqa: N818 - a rule's word to the dispatcher, which makes it a LayoutError
    """A rule that cannot go on without communication: the reason, and layouts with which it could."""

    def __init__(self, why: str, fix: Sequence[tuple[Spec, Layout]] = (), hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint
        self.fix = {spec: layout.on(spec.comm.mesh) for spec, layout in fix}
        self.fix = {spec: layout for spec, layout in self.fix.items() if layout != spec.layout}

    def advice(self) -> str:
        """What the user may write."""
        words = []
        for spec, layout in self.fix.items():
            steps = "; ".join(map(str, path(spec.layout, layout, spec.comm.mesh)))
            words.append(f".redistribute('{layout}') the operand {spec!r} ({steps})")
        return " ".join(filter(None, [self.hint, "; ".join(words)]))
