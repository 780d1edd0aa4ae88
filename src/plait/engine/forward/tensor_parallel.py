"""Tensor parallelism for stock modules, a handler: their code runs unchanged on cut parameters.

It sees every function that reads a cut parameter: ``F.linear`` and ``F.embedding`` are carried out by
``plait.tensor_parallel`` in the style that the plan gives the running module; anything else raises, for it would take a
piece for the whole.  Between a column and a row it also sees functions that mix features, and refuses those that would
mix only a part of them.  It leaves all others alone.

It also knows which activations are cut, so that dropout draws the right slice of the single process's mask.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from plait.comm import Comm
from plait.comm.agree import same_tensors
from plait.core.collectives import Note
from plait.core.layout import Layout
from plait.core.tensor_plan import Style
from plait.engine.forward.context import CurrentForward, CutActivation
from plait.engine.forward.interceptor import Function, Handler, read_among
from plait.engine.forward.products import Products
from plait.sharded.masks import Slice
from plait.sharded.sharded_tensor import ShardedTensor
from plait.tensor_parallel import Parallel, TensorAxis
from plait.tensor_parallel.axis import AXES, Divide, Gather, Leave, Share, Split, Unsplit
from plait.tensor_parallel.gemm import TORCH, Gemm
from plait.tensor_parallel.linear import ColumnInput, Row
from plait.tensor_parallel.plan import OWN_CODE, site_of
from plait.tensor_parallel.vocabulary import embedding

NORMS = {"layer_norm", "rms_norm"}
MIXES = {
    *NORMS,
    *("softmax", "log_softmax", "logsumexp", "cumsum", "sum", "mean", "var", "std", "norm", "vector_norm"),
    *("max", "min", "amax", "amin", "argmax", "argmin", "normalize", "cross_entropy", "mse_loss"),
}
"""Functions that mix the last dim of their first argument."""

AROUND = {"experts", "shared", "once"}
"""Styles that change what comes into a module, or out of it."""


class StageAxis(TensorAxis):
    """The tensor axis for the forwards of a stage: the context says which stream is meant."""

    def __init__(self, comm: Comm, current: CurrentForward, *, sequence: bool, gemm: Gemm = TORCH) -> None:
        self.current = current
        super().__init__(comm, sequence=sequence, gemm=gemm)

    @property
    def sequence(self) -> bool:
        return self._sequence and not self.current.context.unsplit

    @sequence.setter
    def sequence(self, sequence: bool) -> None:
        self._sequence = sequence

    @property
    def microbatch(self) -> int:  # type: ignore[override]
        return self.current.context.microbatch

    @property
    def length(self) -> int:
        return self.current.context.length

    @length.setter
    def length(self, steps: int) -> None:
        self.current.replace(length=steps)


class TensorParallel(Handler):
    """Runs a model's cut modules, whose parameters have this rank's pieces already.

    Args:
        parallel: the plan, resolved on this model before its parameters were cut.
        parameters: the whole shape of every cut parameter, by ``id``.
        products: has the stand-ins, where weight gradients are made in a pass of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallel,
        parameters: Mapping[int, tuple[int, ...]],
        axis: StageAxis,
        products: Products | None = None,
    ) -> None:
        self.modules = dict(model.named_modules())
        self.parameters: Mapping[int, tuple[int, ...]] = parameters
        self.parallel, self.axis, self.current, self.products = parallel, axis, axis.current, products
        self._same_inputs = self._warned = False
        self._experts = [name for name, s in parallel.styles.items() if s.kind == "experts"]
        self._columns_in = {name.rpartition(".")[0] for name, s in parallel.styles.items() if s.enters}
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        # the last input of a column would keep a whole activation and its graph
        model.register_forward_hook(lambda *call: self.current.replace(column_input=None), always_call=True)
        for name, style in parallel.styles.items():
            if style.kind in AROUND and name in self.modules:
                self._goes_around(name, style)
            if style.kind in ("enter", "split", "unsplit") and axis.sequence:
                self.modules[name].register_forward_pre_hook(self._changes_input(name, style.kind), with_kwargs=True)
            if style.kind == "unsplit" and axis.sequence:
                self.modules[name].register_forward_hook(partial(self._cut_again, name))

    def sees(self, func: Function) -> bool:
        return func is F.linear or getattr(func, "__name__", "") in MIXES

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        context = self.current.context
        if context.cut.width:
            self._check_cut_activation(func, args, kwargs)
        if not read_among((*args, *kwargs.values()), self.parameters):
            return call_next(*args, **kwargs)
        name = context.module.name
        style = self.parallel.styles.get(name)
        if style is not None and style.kind in OWN_CODE:
            return call_next(*args, **kwargs)
        if style is not None and style.cut_dim is not None:
            with torch._C.DisableTorchFunction():
                if func is F.linear:
                    return self._linear(name, style, *args, **kwargs)
                if func is F.embedding:
                    return self._embedding(name, *args, **kwargs)
        raise ValueError(
            f"{getattr(func, '__name__', func)!r} in module {name or 'the model'!r} reads a parameter that is cut over "
            f"the tensor axis: the plan covers F.linear and F.embedding of the modules it names; name this module in "
            f"the plan, or leave the parameter whole"
        )

    def _check_cut_activation(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError where a function mixes the features that a column left, of which each rank has a part."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or not self.sees(func):
            return
        context, name = self.current.context, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            if x.shape != context.cut.shape:
                return
        where = context.module.name or "the model"
        if (style := self.parallel.styles.get(where)) is not None and style.kind in ("whole", "shared"):
            return
        if name == "linear":
            if id(args[1] if len(args) > 1 else kwargs["weight"]) in self.parameters:
                return
            what, fix = "multiplies", f"say 'row' for {where!r} in the tensor plan"
        else:
            dim = None if name in NORMS else kwargs.get("dim", args[1] if len(args) > 1 else None)
            if {None, -1, x.dim() - 1}.isdisjoint(dim if isinstance(dim, tuple | list) else (dim,)):
                return
            what, fix = "mixes", "gather it first ('gathered' instead of 'column'), or leave the module whole"
        raise ValueError(
            f"{name!r} in module {where!r} {what} {x.size(-1)} of the {context.cut.width} features that a column-cut "
            f"module left on this rank: between a column and its row only element-wise functions are right; {fix}; or "
            f"say 'whole' for {where!r}, if what it works on is another tensor of this shape"
        )

    # ---- products -----------------------------------------------------------------------------------------------

    def _linear(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.size(-1) != (self.parameters[id(weight)] if style.kind == "divided" else weight.shape)[1]:
            wants = "a whole activation" if style.enters or style.kind == "divided" else "what a column left"
            raise ValueError(
                f"{name!r}, {str(style)!r} in the tensor plan, reads {input.size(-1)} features where its weight on "
                f"this rank has {weight.size(1)}: it wants {wants}; see what the plan says of the module before it"
            )
        return LINEARS[style.kind](self, name, style, input, weight, bias)

    def row(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A cut activation in, a whole one out."""
        self.current.replace(cut=CutActivation())
        y: Tensor = Row.apply(input, self.weight(weight), self.axis, name)
        return y if bias is None else y + self.weight(bias)

    def column(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A whole activation in, a cut one out."""
        siblings = self.parallel.siblings(name)
        y = self._enter(input, site_of(name, self.parallel), siblings).column(weight, bias, siblings.index(name))
        if style.kind == "column":
            fused = max(len(style.parts), style.packed) > 1
            self.current.replace(cut=CutActivation(self.parameters[id(weight)][0], y.shape, fused))
        return y

    def gathered(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A whole activation in, a whole one out."""
        y = self.column(name, style, input, weight, bias)
        return cast(Tensor, Gather.apply(y, self.axis, self.parameters[id(weight)][0], name))

    def divided(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A whole activation in, a whole one out, of which each rank multiplies its part."""
        return self.row(name, style, cast(Tensor, Divide.apply(input, self.axis, name)), weight, bias)

    def head(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A whole activation in, logits out of which each rank has some classes."""
        if self.current.context.whole_logits:
            return self.gathered(name, style, input, weight, bias)
        y = self.column(name, style, input, weight, bias)
        layout = Layout(((),) * (y.dim() - 1) + (("tensor",),))
        return ShardedTensor(y, layout, self.axis.comm, (*y.shape[:-1], self.parameters[id(weight)][0]))

    def _enter(self, input: Tensor, site: str, siblings: Sequence[str]) -> ColumnInput:
        """What siblings read: entered once, whoever comes first."""
        entered: ColumnInput | None = self.current.context.column_input
        if entered is None or not entered.is_of(input, site):
            both = [(self.modules[n].weight, self.modules[n].bias) for n in siblings]
            pairs: list[Any] = [(self.weight(w), None if b is None else self.weight(b)) for w, b in both]
            entered = ColumnInput(input, self.axis, site, pairs)
            self.current.replace(column_input=entered)
        return entered

    def _embedding(
        self,
        name: str,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ValueError(
                f"embedding {name!r} is cut by vocabulary, which max_norm, scale_grad_by_freq and sparse do not go "
                f"with: leave them out, or leave the embedding whole"
            )
        size, whole = self.parameters[id(weight)][0], self.parallel.splits
        return embedding(input, self.weight(weight), size, padding_idx, self.axis, name, whole=whole)

    def weight(self, parameter: Any) -> Any:
        """The parameter, or what stands for it."""
        return parameter if self.products is None else self.products.stand_in(parameter)

    def _before_model(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        whole_logits = kwargs.get("labels") is not None
        if whole_logits and not self._warned:
            warnings.warn(
                "the model computes its own loss from labels=..., so the logits of the whole vocabulary are gathered "
                "on every rank; let plait compute the loss (plait.cross_entropy_sum) and they stay cut",
                stacklevel=2,
            )
        self._warned = whole_logits
        self.current.replace(cut=CutActivation(), whole_logits=whole_logits)
        if self._same_inputs:
            return
        comm, tensors = self.axis.comm, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not same_tensors(comm, tensors, AXES, Note("setup")):
            raise ValueError(
                f"the ranks of a tensor group bring different batches: they work on the same samples, so rank "
                f"{comm.rank} reads the batch of data rank {comm.mesh.data_rank(comm.rank)}"
            )
        self._same_inputs = True

    def _changes_input(self, name: str, kind: str) -> Callable[..., Any]:
        """A hook that gives a module its stream whole (``enter``), for all its columns, or cut in time (``split``)."""
        inside = [n for n, s in self.parallel.styles.items() if s.enters and n.rpartition(".")[0] == name]
        siblings = self.parallel.siblings(inside[0]) if inside else []

        def stream(x: Tensor) -> Tensor:
            if kind == "enter":
                return self._enter(x, site_of(siblings[0], self.parallel), siblings).tensor
            if kind == "unsplit":
                whole = cast(Tensor, Unsplit.apply(x, self.axis, name))
                self.current.replace(unsplit=True)
                return whole
            return cast(Tensor, Split.apply(x, self.axis, name))

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            with torch._C.DisableTorchFunction():
                if args:
                    return (stream(args[0]), *args[1:]), kwargs
                if "hidden_states" in kwargs:
                    return args, kwargs | {"hidden_states": stream(kwargs["hidden_states"])}
            raise ValueError(
                f"{name!r}, {kind!r} in the tensor plan, is called with {', '.join(kwargs)}: give it the stream "
                f"as the first argument, or as hidden_states"
            )

        return hook

    def _goes_around(self, name: str, style: Style) -> None:
        """Hooks on a module whose own code, or whose reader's, works on pieces."""
        module, axis = self.modules[name], self.axis

        def shares(*tensors: Tensor, last: int | None = None) -> Any:
            with torch._C.DisableTorchFunction():
                return Share.apply(axis, name, last, *tensors)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            leaves, spec = tree_flatten((args, kwargs))
            floats = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
            for i, x in zip(floats, shares(*(leaves[i] for i in floats)), strict=True):
                leaves[i] = x
            return cast(tuple[Any, Any], tree_unflatten(leaves, spec))

        def after(module: nn.Module, args: Any, y: Any) -> Tensor:
            if not isinstance(y, Tensor):
                raise ValueError(
                    f"{name!r}, {str(style)!r} in the tensor plan, returns a {type(y).__name__}, no tensor"
                )
            with torch._C.DisableTorchFunction():
                return cast(Tensor, Leave.apply(y, axis, name, False))

        if style.kind == "experts":
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
        elif style.kind == "shared":
            last = sum(style.parts) or None
            module.register_forward_hook(lambda module, args, y: shares(y, last=last)[0])
        else:
            module.register_forward_pre_hook(lambda module, args: (args[0] / axis.ways, *args[1:]))

    def _cut_again(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        """What an unsplit module returns, or the first of it, is the stream, which is cut in time."""
        self.current.replace(unsplit=False, cut=CutActivation())
        y, length = output[0] if isinstance(output, tuple) else output, self.axis.length
        if not isinstance(y, Tensor) or y.dim() < 3 or y.size(1) != length:
            shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"{name!r}, 'unsplit' in the tensor plan, returns {shape}, where sequence parallelism has a stream of "
                f"[batch, {length}, width] to cut in time: leave sequence parallelism out"
            )
        with torch._C.DisableTorchFunction():
            y = cast(Tensor, Split.apply(y, self.axis, name))
        return (y, *output[1:]) if isinstance(output, tuple) else y

    # ---- dropout ------------------------------------------------------------------------------------------------

    def slice_of(self, name: str, shape: Sequence[int]) -> Slice | None:
        """Which slice of its whole activation a module that draws dropout has; None: the whole.  ValueError where the
        plan does not say how it is cut."""
        style, cut = self.parallel.styles.get(name), self.current.context.cut
        if any(f"{name}.".startswith(f"{experts}.") for experts in self._experts):
            raise ValueError(
                f"module {name!r} draws dropout in experts, whose code works on pieces: which part of the whole mask "
                f"is meant is not known; leave this dropout out"
            )
        kind = style.kind if style and style.kind not in ("enter", "split", "unsplit", "local") else ""
        if not kind and cut.width:  # between a column and a row
            if name not in self._columns_in:
                raise ValueError(
                    f"module {name!r} draws dropout between cut products, and the tensor plan does not say on what: "
                    f"add {name!r}: 'hidden' (its last dim is cut), 'heads' or 'whole'"
                )
            kind = "heads" if len(shape) == 4 else "hidden"
        if not kind and self.axis.sequence:
            raise ValueError(
                f"module {name!r} draws dropout under sequence parallelism, and the tensor plan does not say on what: "
                f"add {name!r}: 'sequence' (the stream, cut in time) or 'whole'"
            )
        if kind == "sequence" and self.axis.sequence:
            position = self.current.context.position
            if position is not None and shape[0] != position.num_samples:
                raise ValueError(
                    f"module {name!r} draws dropout of shape {tuple(shape)} under sequence parallelism, where each "
                    f"rank has a part of the time of {position.num_samples} samples: draw before dims are flattened"
                )
            start, _ = self.axis.part(self.axis.length)
            return Slice(1, start, self.axis.length)
        if kind == "heads":
            return Slice(1, self.axis.index * shape[1], self.axis.ways * shape[1])
        if kind == "hidden":
            start, stop = self.axis.part(cut.width)
            if cut.fused or shape[-1] != stop - start:
                raise ValueError(
                    f"module {name!r} draws dropout on {tuple(shape)}, whose last dim is no part of the "
                    f"{cut.width} features that the last column-cut module left on {self.axis.ways} ranks: "
                    f"name it in the tensor plan as heads, sequence or whole, or draw before the product that is fused"
                )
            return Slice(len(shape) - 1, start, cut.width)
        return None


LINEARS: dict[str, Callable[[TensorParallel, str, Style, Tensor, Tensor, Tensor | None], Tensor]] = {
    "column": TensorParallel.column,
    "row": TensorParallel.row,
    "gathered": TensorParallel.gathered,
    "divided": TensorParallel.divided,
    "vocabulary": TensorParallel.head,
}
"""What ``F.linear`` is in a module of each style that cuts a weight: of (name, style, input, weight, bias)."""
