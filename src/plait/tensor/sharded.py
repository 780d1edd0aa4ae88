"""``ShardedTensor``: a tensor cut over named axes of a mesh, used like any other tensor.

    x.shape, x.size(), x.dim()      the whole tensor               x.layout    which axes cut which dim
    x.local                         this rank's piece, plain       x.full()    the whole tensor, gathered

Underneath, a ShardedTensor *is* its local piece: a subclass object without a wrapper, so autograd runs on local
tensors.  Every torch function passes through ``__torch_function__``, which finds the rule (``rules.py``), computes on
the local pieces, and marks the result with its layout:

    y = x @ w      key (matmul, spec of x, spec of w) -> plan, kept -> local matmul -> y marked with the plan's spec

Nothing communicates silently.  What would have to is refused with the redistribution that makes it legal; inside
``with auto_redistribute():`` that redistribution is made, and the ledger shows it.

``loss.backward()`` seeds by the dual table: 1 on every rank where the loss is pending; where it is replicated over
an axis, 1 at index 0 and 0 elsewhere.  ``x.grad`` is a ShardedTensor in the dual layout; ``x.grad.full()`` is the
gradient of the whole.  Replicated tensors, and plain tensors without gradient that meet sharded ones, are taken to
be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from plait.comm import Comm
from plait.core.collectives import Note
from plait.core.layout import Layout
from plait.core.mesh import Mesh
from plait.tensor.dispatch import DIRECT, LayoutError, name_of, plan_for, spec_of
from plait.tensor.gradients import may_be_set, not_summed_already, seed
from plait.tensor.redistribute import NOTE, moved
from plait.tensor.spec import Spec, home_of

_AUTO: ContextVar[bool] = ContextVar("auto_redistribute", default=False)

_run_local: Any = torch._C._disabled_torch_function_impl
_local = torch._C.DisableTorchFunctionSubclass
_grad: Any = Tensor.grad
_PLAIN: Any = Tensor
_NONE: dict[str, Any] = {}


class ShardedTensor(Tensor):
    """A rank's piece of a tensor that is cut, replicated or pending over the axes of a mesh.

    Args:
        local: this rank's piece; gradients flow back to it, in the dual layout.
        layout: a Layout or its text, as in ``"out/tensor in"``.
        comm: this rank's way to the others.
        shape: of the whole tensor.

    Raises:
        ValueError: the piece has not the shape that layout and rank give it.
    """

    _spec: Spec

    def __new__(cls, local: Tensor, layout: Layout | str, comm: Comm, shape: Sequence[int]) -> ShardedTensor:
        if isinstance(local, ShardedTensor):
            raise ValueError("the local piece is a ShardedTensor itself: give its .local, or use .redistribute()")
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        spec = home_of(comm).spec(layout, tuple(shape))
        if tuple(local.shape) != tuple(spec.local_shape):
            raise ValueError(
                f"rank {comm.rank} of '{comm.mesh}' holds {list(spec.local_shape)} of {spec!r}, but the local piece is "
                f"{list(local.shape)}: from_full() cuts a whole tensor"
            )
        return wrap(local.as_subclass(Tensor), spec, own=False)

    @classmethod
    def from_full(cls, full: Tensor, layout: Layout | str, comm: Comm) -> ShardedTensor:
        """This rank's piece of a tensor that every rank has whole: a copy, and a leaf of autograd.

        Where the layout is pending over an axis, index 0 of the axis has the values and the others zeros.
        """
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        home = home_of(comm)
        end = home.spec(layout, tuple(full.shape))
        with torch.no_grad():
            piece = moved(full.detach(), home.replicated(full.shape), end, NOTE)
        out = wrap(piece.clone(memory_format=torch.contiguous_format), end)
        return cast(ShardedTensor, out.requires_grad_(full.requires_grad))

    def full(self, note: Note = NOTE) -> Tensor:
        """The whole tensor, plain and without gradient, on every rank.  All ranks must call it."""
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(ShardedTensor.full, (self,), self, note)
        return self._full(note)

    def _full(self, note: Note) -> Tensor:
        with torch.no_grad(), _local():
            spec = self._spec
            piece = Tensor.detach(self).as_subclass(Tensor)
            whole = moved(piece, spec, spec.home.replicated(spec.shape), note)
            return whole.clone() if whole is piece else whole

    def redistribute(self, layout: Layout | str, note: Note = NOTE) -> ShardedTensor:
        """The same tensor in another layout; all ranks must call it.  ``explain(x, layout)`` tells what it sends."""
        return redistribute(self, layout, note)

    # ---- what it shows of itself: the whole ------------------------------------------------------

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Which axes cut which dim, and over which a sum is pending."""
        return self._spec.layout

    @property
    def comm(self) -> Comm:
        """This rank's way to the others."""
        return self._spec.comm

    @property
    def mesh(self) -> Mesh:
        """The mesh that the layout speaks of."""
        return self._spec.comm.mesh

    @property
    def local(self) -> Tensor:
        """This rank's piece, a plain tensor; gradients flow through, in the dual layout."""
        with _local():
            return self.as_subclass(Tensor)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the whole tensor."""
        return self._spec.shape

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        """The number of dims."""
        return len(self._spec.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self._spec.shape.numel()

    nelement = numel
    ndimension = dim

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        spec = self._spec
        words = " ".join(f"{axis}={how}" for axis, how in spec.layout.placements(spec.comm.mesh).items())
        with _local():
            grad = ", requires_grad=True" if self.requires_grad else ""
            local = repr(self.detach().as_subclass(Tensor))
        return (
            f"ShardedTensor(shape={list(spec.shape)}, {words or 'one rank'}, dtype={self.dtype}{grad}, local={local})"
        )

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
        """The gradient, in the dual layout, or in that in which it was set."""
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

    def __format__(self, spec: str) -> str:
        """A tensor of one number as a number, where every rank has it."""
        return format(self.item(), spec) if not self.shape and spec else repr(self)

    def backward(  # type: ignore[override]
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Gradients of the leaves, in their dual layouts.

        Without ``gradient`` the tensor must have one element; a given one is in the dual layout, or replicated.
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
            elif len(args) == 1:  # most calls have one operand or two, and a loop over them costs a tenth of the call
                key = (func, first)
            elif len(args) == 2:
                second = args[1]
                key = (func, first, second._spec if type(second) is ShardedTensor else second)
            else:
                key = (func, *[a._spec if type(a) is ShardedTensor else a for a in args])
            spec, run = first.plans[key]
        except (KeyError, IndexError, AttributeError, TypeError):
            run = None
        if run is None:  # a new call, or one that takes a closer look
            return _slow(func, args, kwargs or {})
        try:
            out: Any = _run_local(run, types, args, kwargs or _NONE)
        except LayoutError:
            return _slow(func, args, kwargs or {})
        if type(out) is _PLAIN:
            out.__class__ = ShardedTensor
            out._spec = spec
            return out
        return _marked(out, spec)


def wrap(local: Tensor, spec: Spec, own: bool = True) -> ShardedTensor:
    """A plain tensor as a ShardedTensor; the very object if it is ours to mark (``own``), else another one."""
    if type(local) is ShardedTensor:
        if local._spec is spec:
            return local
        own = False
    with _local():
        out: Any = local if own else local.as_subclass(Tensor)
    assert out.shape == spec.local_shape, f"a piece of {list(out.shape)} for {spec!r}"
    out.__class__ = ShardedTensor
    out._spec = spec
    return cast(ShardedTensor, out)


def _marked(out: Any, spec: Spec | tuple[Spec, ...] | None) -> Any:
    if spec is None:
        return out
    return wrap(out, spec) if isinstance(spec, Spec) else type(out)(list(map(wrap, out, spec)))


def _slow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: int = 8) -> Any:
    """A call whose plan is not at hand."""
    direct = DIRECT.get(func)
    if direct is not None:
        return direct(*args, **kwargs)
    try:
        plan = plan_for(func, args, kwargs)
        out = _run_local(plan.run, (), args, kwargs)
    except LayoutError as refused:
        if not (_AUTO.get() and refused.fix and rounds):
            raise
        fix = refused.fix
    else:
        # a plain tensor that was changed in place stays plain
        return out if type(out) is _PLAIN and any(out is a for a in args) else _marked(out, plan.out)
    return _slow(func, *_again(func, args, kwargs, fix), rounds - 1)


@contextmanager
def auto_redistribute() -> Iterator[None]:
    """Inside, an operator that is refused with a redistribution as the way out makes it itself.

    The ledger calls these lines by the phase ``auto`` and the operator's name.
    """
    token = _AUTO.set(True)
    try:
        yield
    finally:
        _AUTO.reset(token)


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fix: dict[Spec, Layout]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, laid out as the refusal wants them."""
    note, home = Note("auto", name_of(func)), next(iter(fix)).home

    def fixed(value: Any) -> Any:
        if isinstance(value, Tensor):
            spec = spec_of(value) or home.replicated(value.shape)
            ours = value if isinstance(value, ShardedTensor) else wrap(value, spec, own=False)
            return _redistribute(ours, fix[spec], note) if spec in fix else value
        return type(value)(map(fixed, value)) if isinstance(value, list | tuple) else value

    return fixed(args), {k: fixed(v) for k, v in kwargs.items()}


def redistribute(x: Tensor, layout: Layout | str, note: Note = NOTE) -> ShardedTensor:
    """``x`` in another layout; differentiable, and the way back is the dual redistribution in reverse."""
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(redistribute, (x,), x, layout, note)
    return _redistribute(x, layout, note)


def _redistribute(x: Tensor, layout: Layout | str, note: Note = NOTE) -> ShardedTensor:
    if not isinstance(x, ShardedTensor):
        raise ValueError("redistribute() moves a ShardedTensor: make one with ShardedTensor.from_full()")
    spec, layout = x._spec, Layout.parse(layout) if isinstance(layout, str) else layout
    end = spec.home.spec(layout, spec.shape)
    return x if end is spec else wrap(moved(x.local, spec, end, note), end, own=True)


DIRECT[redistribute] = _redistribute


def _autograd_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **options: Any
) -> None:
    """``torch.autograd.backward``: each tensor is seeded by the dual table."""
    ends = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(ends)
    seeds = [seed(cast(ShardedTensor, y)._spec, y, g) for y, g in zip(ends, given, strict=True)]
    with _local():
        torch.autograd.backward([y.as_subclass(Tensor) for y in ends], seeds, retain_graph, create_graph, **options)


def _autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
    allow_unused: Any = None, **options: Any,
) -> tuple[ShardedTensor | None, ...]:  # fmt: skip
    """``torch.autograd.grad``: the gradients are in the dual layouts of the inputs."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs or [None] * len(outputs)
    seeds = [seed(y._spec, y, g) for y, g in zip(outputs, given, strict=True)]
    with _local():
        outputs = [y.as_subclass(Tensor) for y in outputs]
        grads = torch.autograd.grad(outputs, inputs, seeds, retain_graph, create_graph, allow_unused=allow_unused)
    return tuple(g if g is None else wrap(g, x._spec.dual) for g, x in zip(grads, inputs, strict=True))


def _register_hook(x: ShardedTensor, hook: Any) -> Any:
    """The hook sees this rank's piece of the gradient, plain."""
    with _local():
        return Tensor.register_hook(x, hook)


DIRECT[Tensor.register_hook] = _register_hook
DIRECT[ShardedTensor.full] = ShardedTensor._full
DIRECT[torch.autograd.grad] = _autograd_grad
DIRECT[torch.autograd.backward] = _autograd_backward
