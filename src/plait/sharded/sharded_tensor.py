"""``ShardedTensor``: a tensor cut over named axes of a mesh, used like any other tensor.

    x.shape, x.size(), x.dim()      the whole tensor               x.sharding  the axes that cut each dim
    x.local                         this rank's piece, plain       x.full()    the whole tensor, gathered

Underneath, a ShardedTensor *is* its local piece: a subclass object without a wrapper, so autograd runs on local
tensors.  Every torch function passes through ``__torch_function__``, which finds the rule (``rules.py``), computes on
the local pieces, and marks the result with its layout:

    y = x @ w      key (matmul, spec of x, spec of w) -> OpPlan, kept -> local matmul -> y marked with its spec

Nothing communicates silently.  A call that would have to is refused with the redistribution that makes it legal; inside
``with auto_redistribute():`` that redistribution is made, and the ledger shows it.

``loss.backward()`` seeds by the dual table: 1 on every rank if the loss is pending; if it is replicated over an axis, 1
at index 0 and 0 elsewhere.  ``x.grad`` is a ShardedTensor in the dual layout; ``x.grad.full()`` is the gradient of the
whole.  Replicated tensors, and plain tensors without gradient that meet sharded ones, are assumed to be equal on all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plait.comm import Comm
from plait.sharded.dispatch import DIRECT, LayoutError, decision, mapped, refused, spec_of, tensors_in
from plait.sharded.gradients import may_be_set, not_summed_already, seed
from plait.sharded.layout import Layout
from plait.sharded.redistribute import NOTE, moved
from plait.sharded.rules import lossless, name_of
from plait.sharded.spec import Refusal, Spec, SpecCache, spec_cache
from plait.sharded.spec_tensor import SpecTensor
from plait.table.collectives import Note
from plait.tensor.vocabulary import CutClasses
from plait.torch_private import DisableTorchFunctionSubclass

_AUTO: ContextVar[bool] = ContextVar("auto_redistribute", default=False)

_local = DisableTorchFunctionSubclass
_grad: Any = Tensor.grad
_PLAIN: Any = Tensor
_NONE: dict[str, Any] = {}


class ShardedTensor(SpecTensor):
    """A rank's piece of a tensor that is cut, replicated or pending over the axes of a mesh.

    Args:
        local: this rank's piece; gradients flow back to it, in the dual layout.
        layout: a Layout or its text, as in ``"out/tensor in"``.
        comm: this rank's access to the others.
        shape: the shape of the whole tensor.

    Raises:
        ValueError: the piece does not have the shape that layout and rank give it.
    """

    def __new__(cls, local: Tensor, layout: Layout | str, comm: Comm, shape: Sequence[int]) -> ShardedTensor:
        if isinstance(local, ShardedTensor):
            raise ValueError("the local piece is a ShardedTensor itself: give its .local, or use .redistribute()")
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        spec = spec_cache(comm).spec(layout, tuple(shape), local.dtype)
        if tuple(local.shape) != tuple(spec.local_shape):
            raise ValueError(
                f"rank {comm.rank} of '{comm.mesh}' holds {list(spec.local_shape)} of {spec!r}, but the local piece is "
                f"{list(local.shape)}: from_full() cuts a whole tensor"
            )
        return wrap(local.as_subclass(Tensor), spec, own=False)

    @classmethod
    def from_full(cls, full: Tensor, layout: Layout | str, comm: Comm) -> ShardedTensor:
        """Returns this rank's piece of a tensor that every rank has whole: a copy, and a leaf of autograd.

        If the layout is pending over an axis, index 0 of the axis has the values and the others zeros.
        """
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        cache = spec_cache(comm)
        end = cache.spec(layout, tuple(full.shape), full.dtype)
        with torch.no_grad():
            piece = moved(full.detach(), cache.replicated(full), end, NOTE)
        out = wrap(piece.clone(memory_format=torch.contiguous_format), end)
        return cast(ShardedTensor, out.requires_grad_(full.requires_grad))

    def cut_classes(self) -> CutClasses:
        """Returns the local logits, for ``plait.cross_entropy_sum``; ValueError if more than the last dim is cut."""
        layout = self.sharding
        if any(layout.dims[:-1]) or layout.pending:
            raise ValueError(
                f"cross_entropy_sum on logits of layout '{layout}': only the classes, the last dim, may be cut; "
                f"redistribute the logits first"
            )
        return self.local, self.shape[-1], self.comm, layout.dims[-1]

    def full(self, note: Note = NOTE) -> Tensor:
        """Returns the whole tensor, plain and without gradient, on every rank.  All ranks must call it."""
        with torch.no_grad(), _local():
            spec = self._spec
            piece = Tensor.detach(self).as_subclass(Tensor)
            whole = moved(piece, spec, spec.with_layout(((),) * len(spec.shape)), note)
            return whole.clone() if whole is piece else whole

    def redistribute(self, layout: Layout | str, note: Note = NOTE) -> ShardedTensor:
        """Returns the tensor in another layout; all ranks must call it.  ``explain(x, layout)`` lists its messages."""
        return redistribute(self, layout, note)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return cast(ShardedTensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError("only leaves of autograd can be copied deeply: .detach() it")
        with torch.no_grad():
            copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            if hasattr(self, "_is_param"):
                copied._is_param = True
            if self.grad is not None:
                copied.grad = self.grad.clone()
        return cast(ShardedTensor, copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ShardedTensor belongs to a running world and is not pickled: save its .full() or its .local")

    # ---- gradients -------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def grad(self) -> ShardedTensor | None:
        """The gradient, in the dual layout, or in the layout in which it was set."""
        with _local():
            grad = _grad.__get__(self)
        if grad is not None and type(grad) is not ShardedTensor:
            return wrap(grad, self._spec.dual)
        return grad

    @grad.setter
    def grad(self, grad: ShardedTensor | None) -> None:
        may_be_set(self._spec, grad)
        if grad is not None and grad._spec is not self._spec.dual and not hasattr(self, "_watch"):
            with _local():
                self._watch = self.register_post_accumulate_grad_hook(not_summed_already)
        with _local():
            _grad.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def backward(  # type: ignore[override]
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Computes gradients of the leaves, in their dual layouts.

        Without ``gradient`` the tensor must have one element; a given one must be in the dual layout, or replicated.
        """
        start = seed(self._spec, self, gradient)
        with _local():
            torch.autograd.backward(self.as_subclass(Tensor), start, retain_graph, create_graph)

    # ---- every other function --------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            first = args[0]._spec
            if kwargs:
                given = [(k, a._spec if type(a) is ShardedTensor else a) for k, a in kwargs.items()]
                key = (func, *[a._spec if type(a) is ShardedTensor else a for a in args], *given)
            elif len(args) == 1:  # most calls have one operand or two; a loop over them would cost a tenth of the call
                key = (func, first)
            elif len(args) == 2:
                second = args[1]
                key = (func, first, second._spec if type(second) is ShardedTensor else second)
            else:
                key = (func, *[a._spec if type(a) is ShardedTensor else a for a in args])
            spec, run = first.op_plans[key]
        except (KeyError, IndexError, AttributeError, TypeError):
            run = None
        if run is None:  # a new call, or one that takes a closer look
            return _slow(func, args, kwargs or {})
        try:
            with _local():
                out: Any = run(*args, **(kwargs or _NONE))
        except LayoutError:
            return _slow(func, args, kwargs or {})
        if type(out) is _PLAIN:
            out._spec = spec if out.dtype is spec.dtype else spec.of(out.dtype)
            out.__class__ = ShardedTensor
            return out
        return _marked(out, spec)


def wrap(local: Tensor, spec: Spec, own: bool = True) -> ShardedTensor:
    """Returns a plain tensor as a ShardedTensor: the same object if we may mark it (``own``), otherwise another.

    Raises:
        LayoutError: the piece is not the one that the spec describes.
    """
    if type(local) is ShardedTensor:
        if local._spec is spec:
            return local
        own = False
    with _local():
        out: Any = local if own else local.as_subclass(Tensor)
        if out.size() != spec.local_shape:
            raise LayoutError(
                f"a rule says {spec!r}: this rank would hold {list(spec.local_shape)}, not {list(out.size())}"
            )
        out._spec = spec if out.dtype is spec.dtype else spec.of(out.dtype)
    out.__class__ = ShardedTensor
    return cast(ShardedTensor, out)


def _marked(out: Any, spec: Spec | tuple[Spec, ...] | SpecCache | None, given: Sequence[Any] = ()) -> Any:
    """Marks the tensors of a result with their specs; those that were ``given`` stay as they are."""
    if spec is None:
        return out
    specs = iter((spec,) if isinstance(spec, Spec) else spec if isinstance(spec, tuple) else ())

    def mark(tensor: Tensor) -> Tensor:
        own = spec.replicated(tensor) if isinstance(spec, SpecCache) else next(specs)
        return tensor if any(tensor is t for t in given) and type(tensor) is not ShardedTensor else wrap(tensor, own)

    return mapped(mark, out)


def _slow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: int = 8) -> Any:
    """Runs a call whose ``OpPlan`` is not known yet."""
    direct = DIRECT.get(func)
    if direct is not None:
        return direct(*args, **kwargs)
    moved_ones: list[_Stand] = []
    while True:
        try:
            out = _decided(func, args, kwargs)
            break
        except LayoutError as error:
            if not (_AUTO.get() and error.fix and rounds):
                raise
            fix = error.fix
        args, kwargs = _again(func, args, kwargs, fix, moved_ones)
        rounds -= 1
    return _returned(func, out, moved_ones) if moved_ones else out


def _decided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out the plan of a rule, and keeps it once its result is as the rule says."""
    plan, keep = decision(func, args, kwargs)
    given = list(tensors_in([args, kwargs]))
    assert plan.run is not None
    with _local():
        local = plan.run(*args, **kwargs)
    out = _marked(local, plan.out, given)
    if keep is None:
        return out
    specs = [s for s in map(spec_of, given) if s is not None]
    try:
        for result in tensors_in([out]):
            lossless(specs, spec_of(result) or specs[0])
    except Refusal as refusal:
        raise refused(func, specs, refusal) from None
    keep()
    return out


@contextmanager
def auto_redistribute() -> Iterator[None]:
    """Makes operators inside carry out the redistribution with which they would be refused.

    The ledger has these lines under the phase ``auto`` and the operator's name.
    """
    token = _AUTO.set(True)
    try:
        yield
    finally:
        _AUTO.reset(token)


class _Stand(NamedTuple):
    """A redistributed operand that replaces a given one, and its version when it was made."""

    given: Tensor
    copy: ShardedTensor
    version: int


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fix: dict[Spec, Layout], stands: list[_Stand]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments in the layouts of the refusal; those that were moved are added to the list."""
    note, cache = Note("auto", name_of(func)), next(iter(fix)).cache
    copies: dict[int, ShardedTensor] = {}
    given = {id(s.copy): s.given for s in stands}

    def fixed(value: Tensor) -> Tensor:
        spec = spec_of(value) or cache.replicated(value)
        if spec not in fix:
            return value
        if id(value) not in copies:  # an operand that is given twice stays one object
            ours = value if isinstance(value, ShardedTensor) else wrap(value, spec, own=False)
            copy = copies[id(value)] = redistribute(ours, fix[spec], note)
            stands[:] = [s for s in stands if s.copy is not value]
            stands.append(_Stand(given.get(id(value), value), copy, copy._version))
        return copies[id(value)]

    return cast(tuple[tuple[Any, ...], dict[str, Any]], mapped(fixed, (args, kwargs)))


def _returned(func: Any, out: Any, stands: list[_Stand]) -> Any:
    """Returns the result, after in-place changes were copied back to the given tensors."""
    own: dict[int, Tensor] = {}
    for given, copy, version in stands:
        if copy._version != version:
            spec = spec_of(given)
            note = Note("auto", name_of(func))
            back = redistribute(copy, spec.layout if spec else Layout.replicated(given.dim()), note)
            with _local():
                given.as_subclass(Tensor).copy_(back.as_subclass(Tensor))
            own[id(copy)] = given
    copies = {_memory(copy) for _, copy, _ in stands}

    def returned(tensor: Tensor) -> Tensor:
        if id(tensor) not in own and _memory(tensor) in copies:
            tensor._copied_by = name_of(func)  # type: ignore[attr-defined]
        return own.get(id(tensor), tensor)

    return mapped(returned, out)


def _memory(tensor: Tensor) -> int:
    with _local():
        return int(tensor.untyped_storage()._cdata)


def redistribute(x: Tensor, layout: Layout | str, note: Note = NOTE) -> ShardedTensor:
    """Returns ``x`` in another layout; differentiable: the backward is the dual redistribution in reverse."""
    if not isinstance(x, ShardedTensor):
        raise ValueError("redistribute() moves a ShardedTensor: make one with ShardedTensor.from_full()")
    spec, layout = x._spec, Layout.parse(layout) if isinstance(layout, str) else layout
    end = spec.cache.spec(layout, spec.shape, spec.dtype)
    return x if end is spec else wrap(moved(x.local, spec, end, note), end, own=True)
