"""Follows what is cut through the operators of a forward, and refuses those that would take a part for the whole.

Without a parallel layer, every dim of an activation is whole.  Behind a column its features are cut, and under sequence
parallelism its time; code in between, which is the model's own, must treat each feature (or head, or step) by itself:

    h = column(x)              [2, 5, 8]       dim 2: 8 of 16 features
    h.view(2, 5, -1, 4)        [2, 5, 2, 4]    dim 2: 2 of 4 groups
    (q @ k.mT).softmax(-1)     [2, 2, 5, 5]    dim 1: the same; dim 3 is whole                              right
    h.softmax(-1)                              works along dim 2                                            refused
    h.chunk(2, -1)                             the whole has its middle elsewhere, unless it is fused       refused
    h * torch.arange(8)                        counts from 0 on each rank                                   refused

What an operator does is read from torch's own schema: it acts on each element (the tag ``pointwise``), it works along
its ``dim`` (or along all, where its siblings have one), or it has a rule here.  Of what any other operator makes
nothing is known any more: it is neither refused nor followed.

A dispatch mode sees the operators under every spelling, also inside functions of torch's that are made of others.  It
costs tens of microseconds for each of them, so it is on in a model's first forward alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.anymodel.tensor.marks import (
    COUNTED,
    Cut,
    Dim,
    Dims,
    Factor,
    between,
    cut_of,
    is_counted,
    joined,
    marked,
    plain,
    regrouped,
    runs,
)
from plait.anymodel.tensor.refusals import CutRefusals
from plait.torch_private import TorchDispatchMode, current_graph_task_id
from plait.torch_private import pop_mode as _pop_mode
from plait.torch_private import push_mode as _push_mode

Given = Mapping[str, Any]
"""The arguments of an operator by their names in its schema, defaults too."""

UNKNOWN = {
    *("index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill"),
    *("index_put", "repeat_interleave", "unfold", "select_scatter", "slice_scatter", "diagonal", "take_along_dim"),
}
"""Operators with a ``dim`` that do not mix what lies along it."""

CHECKS = {"any", "all"}
"""Asked of all elements at once, as ``h.isnan().any()`` is, each rank may look at its own."""

SAME = {"alias", "detach", "clone", "_to_copy", "lift_fresh", "copy", "contiguous"}


class FollowCuts(TorchDispatchMode):
    """The mode of one forward.

    Args:
        where: the name of the running module, or None where nothing is to be refused.
    """

    supports_higher_order_operators = True

    def __init__(self, where: Callable[[], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusals = CutRefusals(where)
        self._known = WeakTensorKeyDictionary()
        self._paused = False

    def __enter__(self) -> Self:
        """Torch's own ``__enter__`` also sets flags of the process, which ranks that are threads would leave set."""
        _push_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _pop_mode()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, code that knows of the ranks works: nothing is followed."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def mark(self, x: Tensor, dim: int, cut: Cut) -> None:
        """A dim of ``x`` is cut."""
        dims = list(plain(x.shape))
        dims[dim] = (Factor(x.size(dim), cut),)
        self._known[x] = tuple(dims)

    def same(self, x: Tensor, y: Tensor) -> None:
        """``y`` is cut as ``x`` is, as far as it has its shape."""
        if x.shape == y.shape and x in self._known:
            self._known[y] = self._known[x]

    def dims(self, x: Tensor) -> Dims:
        """How each dim lies on the ranks."""
        known: Dims | None = self._known.get(x)
        return plain(x.shape) if known is None else known

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        aten, in_backward = getattr(func, "namespace", "") == "aten", current_graph_task_id() != -1
        if self._paused or in_backward or not aten:  # a gradient that a forward takes of what is cut is a share
            return out
        name = func._schema.name.removeprefix("aten::")
        if name not in ("arange", "linspace") and not self._any_known((*args, *kwargs.values())):
            return out
        given = {a.name: a.default_value for a in func._schema.arguments}
        given |= zip(given, args, strict=False)
        made = self._made(func, name.rstrip("_") if not name.startswith("__") else name, given | kwargs, out)
        outs = out if isinstance(out, list | tuple) else (out,)
        for y, dims in zip(outs, made if isinstance(made, list) else [made] * len(outs), strict=False):
            if isinstance(y, Tensor) and dims is not None and len(dims) == y.dim() and marked(dims):
                self._known[y] = dims
            elif isinstance(y, Tensor):
                self._known.pop(y, None)
        return out

    def _any_known(self, values: Sequence[Any]) -> bool:
        return any(
            (isinstance(v, Tensor) and v in self._known) or (isinstance(v, list | tuple) and self._any_known(v))
            for v in values
        )

    def _made(self, func: Any, name: str, given: Given, out: Any) -> Any:
        """The dims of what an operator has made, or a list of them; None: unknown."""
        if name.startswith("_scaled_dot_product"):
            return self._attention(name, given)
        if name in RULES:
            return RULES[name](self, name, given, out)
        if torch.Tag.pointwise in func.tags or name in SAME:
            return self._pointwise(name, given, out)
        x = given.get("self", given.get("input"))
        if not isinstance(x, Tensor) or name in UNKNOWN:
            return None
        every = list(range(x.dim()))
        dims = self.dims(x)
        if given.get("reduction"):
            self.refusals.mixes(name, dims, every)
        along = next((key for key in ("dim", "dims") if key in given), None)
        if along is None:
            if name not in CHECKS and any(a.name == "dim" for o in _overloads(func) for a in o._schema.arguments):
                self.refusals.mixes(name, dims, every)
            return None
        told = given[along]
        told = every if told is None or told == [] else [d % max(1, x.dim()) for d in _listed(told)]
        self.refusals.mixes(name, dims, told)
        outs = out if isinstance(out, list | tuple) else (out,)
        return [_along(dims, told, x, y) if isinstance(y, Tensor) else None for y in outs]

    # ---- two checks -------------------------------------------------------------------------------------------------

    def check_view(self, x: Tensor, shape: Sequence[int]) -> None:
        """Raises ValueError where the -1 of a new shape would swallow the cut, which the plan gives to heads."""
        old = [cut for dim in self.dims(x) if (cut := cut_of(dim)) is not None and cut.grain > 1]
        if -1 not in shape or not old:
            return
        at, known = list(shape).index(-1), -prod(shape)
        sizes = [x.numel() // known if size == -1 and known else size for size in shape]
        for place, dim in enumerate(regrouped(self.dims(x), sizes, at) or ()):
            cut = cut_of(dim)
            if cut is not None and cut.grain > 1 and place < at and cut.unit != old[0].unit:
                self.refusals.refuse(
                    "view",
                    old[0],
                    f"makes {list(shape)} of",
                    f"write (..., -1, {old[0].grain}) in place of (..., {shape[place]}, -1)",
                    f"the -1 becomes {sizes[at]}, where heads of {old[0].grain} stay whole",
                )

    def check_meets(self, x: Tensor, wanted: tuple[int, ...], row: str, style: str) -> None:
        """Raises ValueError where a row's input is not cut as its weight is: in runs of ``wanted``."""
        last = self.dims(x)[-1]
        cut = cut_of(last)
        if cut is not None and runs(last) != wanted:
            has = "|".join(map(str, runs(last) or ())) or "no one piece"
            raise ValueError(
                f"{row!r}, {style!r} in the tensor plan, multiplies other features than its weight has on this rank: "
                f"{cut.name!r} and what follows it leave {has}, the weight has {'|'.join(map(str, wanted))}: say how "
                f"its weight is packed for both ('column in 2' and 'row in 2'), or for none"
            )

    # ---- rules --------------------------------------------------------------------------------------------------

    def _pointwise(self, name: str, given: Given, out: Any) -> Any:
        first = out[0] if isinstance(out, list | tuple) else out
        if not isinstance(first, Tensor):
            return None
        tensors, shape = [t for t in given.values() if isinstance(t, Tensor)], first.shape
        found: list[Dim] = []
        for back in range(len(shape), 0, -1):
            size = shape[-back]
            dims = [self.dims(t)[-back] for t in tensors if t.dim() >= back and t.size(-back) == size]
            cut = [dim for dim in dims if cut_of(dim) is not None]
            counted = [dim for dim in dims if is_counted(dim)]
            mark = cut_of(cut[0]) if cut else None
            if mark is not None and len({runs(dim) for dim in cut}) > 1:
                fix = "say how each is packed ('column in 2')"
                self.refusals.refuse(name, mark, "brings together with others", fix, "the two are not cut alike")
            if mark is not None and counted and size > 1:
                self.refusals.counts(name, mark)
            found.append((cut or counted or [(Factor(size),)])[0])
        return tuple(found)

    def _view(self, name: str, given: Given, out: Any) -> Any:
        x = given["self"]
        if "size" not in given:  # it reads the bits as another dtype
            return self.dims(x) if out.shape == x.shape else None
        size = list(given["size"])
        self.check_view(x, size)
        return regrouped(self.dims(x), out.shape, size.index(-1) if -1 in size else None)

    def _transpose(self, name: str, given: Given, out: Any) -> Any:
        dims = list(self.dims(given["self"]))
        if len(dims) > 1:
            a, b = (0, 1) if name == "t" else (given["dim0"], given["dim1"])
            dims[a], dims[b] = dims[b], dims[a]
        return tuple(dims)

    def _permute(self, name: str, given: Given, out: Any) -> Any:
        return tuple(self.dims(given["self"])[d] for d in given["dims"])

    def _unsqueeze(self, name: str, given: Given, out: Any) -> Any:
        dims = list(self.dims(given["self"]))
        dims.insert(given["dim"] % out.dim(), (Factor(1),))
        return tuple(dims)

    def _squeeze(self, name: str, given: Given, out: Any) -> Any:
        x = given["self"]
        along = _listed(given.get("dim", list(range(x.dim()))))
        gone = {d % max(1, x.dim()) for d in along}
        return tuple(dim for d, dim in enumerate(self.dims(x)) if d not in gone or x.size(d) != 1)

    def _expand(self, name: str, given: Given, out: Any) -> Any:
        x = given["self"]
        dims = plain(out.shape[: out.dim() - x.dim()]) + self.dims(x)
        same = [False] * (out.dim() - x.dim()) + [a == b for a, b in zip(x.shape, out.shape[-x.dim() :], strict=False)]
        return tuple(dim if keep else (Factor(n),) for dim, keep, n in zip(dims, same, out.shape, strict=True))

    def _slice(self, name: str, given: Given, out: Any) -> Any:
        x, dim = given["self"], given["dim"] % given["self"].dim()
        size = x.size(dim)
        start, stop, step = slice(given["start"], given["end"], given["step"]).indices(size)
        return self._parts(name, x, dim, [(start, stop)] if step == 1 else [(-1, -1)])[0]

    def _split(self, name: str, given: Given, out: Any) -> Any:
        x, dim = given["self"], given["dim"] % given["self"].dim()
        places = [0]
        for y in out:
            places.append(places[-1] + y.size(dim))
        return self._parts(name, x, dim, list(pairwise(places)))

    def _parts(self, name: str, x: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> list[Dims | None]:
        dims, found = self.dims(x), list[Dims | None]()
        for start, stop in ranges:
            part = between(dims[dim], start, stop)
            if part is None and (cut := cut_of(dims[dim])) is not None:
                self.refusals.takes(name, cut, max(2, len(ranges)))
            found.append(None if part is None else (*dims[:dim], part, *dims[dim + 1 :]))
        return found

    def _select(self, name: str, given: Given, out: Any) -> Any:
        x, dim = given["self"], given["dim"] % given["self"].dim()
        dims = self.dims(x)
        if (cut := cut_of(dims[dim])) is not None:
            self.refusals.takes(name, cut, x.size(dim) if name == "unbind" and x.size(dim) > 1 else 2)
        left = (*dims[:dim], *dims[dim + 1 :])
        return [left] * len(out) if name == "unbind" else left

    def _cat(self, name: str, given: Given, out: Any) -> Any:
        tensors = [t for t in given["tensors"] if t.dim() == out.dim()]
        dim = given["dim"] % out.dim()
        each = [self.dims(t) for t in tensors]
        along = joined([dims[dim] for dims in each])
        others = next((dims for dims in each if marked(dims)), None)
        return None if along is None or others is None else (*others[:dim], along, *others[dim + 1 :])

    def _stack(self, name: str, given: Given, out: Any) -> Any:
        dims = list(next(dims for t in given["tensors"] if marked(dims := self.dims(t))))
        dims.insert(given["dim"] % out.dim(), (Factor(len(given["tensors"])),))
        return tuple(dims)

    def _pad(self, name: str, given: Given, out: Any) -> Any:
        x = given["self"]
        padded = [x.dim() - 1 - i // 2 for i, n in enumerate(given["pad"]) if n]
        self.refusals.mixes(name, self.dims(x), padded)
        return tuple((Factor(out.size(d)),) if d in padded else dim for d, dim in enumerate(self.dims(x)))

    def _glu(self, name: str, given: Given, out: Any) -> Any:
        x, dim = given["self"], given["dim"] % given["self"].dim()
        return self._parts(name, x, dim, [(0, x.size(dim) // 2), (x.size(dim) // 2, x.size(dim))])[0]

    def _embedding(self, name: str, given: Given, out: Any) -> Any:
        return (*self.dims(given["indices"]), (Factor(out.size(-1)),))

    def _positions(self, name: str, given: Given, out: Any) -> Any:
        return ((Factor(out.size(0), COUNTED),),)

    def _norm(self, name: str, given: Given, out: Any) -> Any:
        """Of the last dims (layer, rms), of the channels (group), or of all but the channels (batch)."""
        dims = self.dims(given["input"])
        along = list(range(len(dims) - len(given.get("normalized_shape", dims[1:])), len(dims)))
        if "batch_norm" in name:
            along = [0, *along[1:]] if given["training"] else []
        self.refusals.mixes(name, dims, along)
        return [dims]

    def _product(self, name: str, given: Given, out: Any) -> Any:
        """Matrices, batches of them, vectors: the last dim of one meets the last but one of the other."""
        pair = [given[k] for k in PAIRS if isinstance(given.get(k), Tensor)]
        if name not in ADDING and isinstance(given.get("self"), Tensor):
            pair.insert(0, given["self"])
        a, b = map(self.dims, pair)
        for dim in (a[-1], b[-2] if len(b) > 1 else b[0]):
            if (cut := cut_of(dim)) is not None:
                fix = f"say 'row' for {self.refusals.where()!r}, if it is a linear layer, or gather them first"
                self.refusals.refuse(name, cut, "multiplies and adds up", fix)
        return (*a[:-1], b[-1]) if len(b) > 1 else a[:-1]

    def _attention(self, name: str, given: Given) -> Any:
        query, key, value = (self.dims(given[k]) for k in ("query", "key", "value"))
        for dims, along in ((query, (-1,)), (key, (-1, -2)), (value, (-2,))):
            self.refusals.mixes(name, dims, along)
        mask = given.get("attn_mask", given.get("attn_bias"))
        for dim, bias in zip(query[-3::-1], self.dims(mask)[-3::-1], strict=False) if isinstance(mask, Tensor) else ():
            if (cut := cut_of(dim)) is not None and is_counted(bias):
                self.refusals.counts(name, cut)
        return [(*query[:-1], value[-1])]


PAIRS = ("mat1", "batch1", "mat2", "batch2", "mat", "vec", "tensor", "vec2", "other")
ADDING = {"addmm", "baddbmm", "addmv"}

RULES: dict[str, Callable[[FollowCuts, str, Given, Any], Any]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), FollowCuts._view),
    **dict.fromkeys(("transpose", "t"), FollowCuts._transpose),
    "permute": FollowCuts._permute,
    "unsqueeze": FollowCuts._unsqueeze,
    "squeeze": FollowCuts._squeeze,
    "expand": FollowCuts._expand,
    "slice": FollowCuts._slice,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), FollowCuts._split),
    **dict.fromkeys(("select", "unbind"), FollowCuts._select),
    "cat": FollowCuts._cat,
    "stack": FollowCuts._stack,
    "constant_pad_nd": FollowCuts._pad,
    "glu": FollowCuts._glu,
    "embedding": FollowCuts._embedding,
    **dict.fromkeys(("arange", "linspace"), FollowCuts._positions),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "native_group_norm"), FollowCuts._norm),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), FollowCuts._norm),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", *ADDING), FollowCuts._product),
}
"""What operators make that neither act on each element nor say in their schema what they work along."""


def _listed(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, list | tuple) else [dims]


def _overloads(func: Any) -> list[Any]:
    packet = func.overloadpacket
    return [getattr(packet, name) for name in packet.overloads()]


def _along(dims: Dims, told: Sequence[int], x: Tensor, y: Tensor) -> Dims | None:
    """Of an operator's output, whose dims are its input's but for those that it has worked along."""
    if y.dim() == x.dim():
        return tuple(dim if y.size(d) == x.size(d) else (Factor(y.size(d)),) for d, dim in enumerate(dims))
    return tuple(dim for d, dim in enumerate(dims) if d not in told) if y.dim() == x.dim() - len(told) else None
