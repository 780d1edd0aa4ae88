"""Tensor parallelism for stock modules, a handler: their code runs unchanged on cut parameters.

It sees every function that reads a cut parameter: ``F.linear`` and ``F.embedding`` are carried out by
``plait.tensor`` in the style that the plan gives the running module; anything else raises, for it would take a
piece for the whole.  What the model's own code does with cut activations is followed, operator by operator, in its
first forward (``first_forward``); in all others the functions that mix most often are seen, by shape (``mixing``).

It also knows which activations are cut, so that dropout draws the right slice of the single process's mask.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from plait.comm import Comm
from plait.comm.agree import same_tensors
from plait.forward.context import CurrentForward, CutActivation
from plait.forward.first_forward import ALONGSIDE, FirstForward
from plait.forward.interceptor import Function, Handler, read_among
from plait.forward.masks import Slice
from plait.forward.mixing import check_mixing, may_mix
from plait.forward.products import Products
from plait.sharded.sharded_tensor import ShardedTensor
from plait.table.collectives import Note
from plait.table.layout import Layout
from plait.table.tensor_plan import Style
from plait.tensor import Parallel, TensorAxis
from plait.tensor.axis import AXES, Divide, Gather, Leave, Share, Split, Unsplit
from plait.tensor.gemm import TORCH, Gemm
from plait.tensor.linear import ColumnInput, Row
from plait.tensor.marks import Cut
from plait.tensor.plan import OWN_CODE, cut_by, site_of
from plait.tensor.shares import SharesCheck
from plait.tensor.vocabulary import embedding

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
        self._shares = SharesCheck(axis)
        self.first = FirstForward(parallel.styles, axis, self.current)
        self._experts = [name for name, s in parallel.styles.items() if s.kind == "experts"]
        self._columns_in = {name.rpartition(".")[0] for name, s in parallel.styles.items() if s.enters}
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model, always_call=True)
        for name, parameter in model.named_parameters():
            owner = parallel.styles.get(name.rpartition(".")[0], Style("sequence" if axis.sequence else "summed"))
            if id(parameter) in parallel.summed and owner.kind == "summed":  # parts of the time may well be alike
                self._shares.watch(parameter, name, owner)
        for name, style in parallel.styles.items():
            if style.kind in AROUND and name in self.modules:
                self._goes_around(name, style)
            if style.kind in ("enter", "split", "unsplit") and axis.sequence:
                self.modules[name].register_forward_pre_hook(self._changes_input(name, style.kind), with_kwargs=True)
            if style.kind == "unsplit" and axis.sequence:
                self.modules[name].register_forward_hook(partial(self._cut_again, name))

    def sees(self, func: Function) -> bool:
        return func is F.linear or func in ALONGSIDE or may_mix(func)

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        context = self.current.context
        if context.cut.width:
            check_mixing(func, args, kwargs, context, self.parallel.styles, self.parameters)
        if not read_among((*args, *kwargs.values()), self.parameters):
            if self.first.on and func in ALONGSIDE:
                return self.first.alongside(func, call_next, *args, **kwargs)
            return call_next(*args, **kwargs)
        name = context.module.name
        style = self.parallel.styles.get(name)
        if style is not None and style.kind in OWN_CODE:
            with self.first.paused():
                return call_next(*args, **kwargs)
        if style is not None and style.cut_dim is not None:
            with self._unseen():
                if func is F.linear:
                    return self._linear(name, style, *args, **kwargs)
                if func is F.embedding:
                    return self._embedding(name, *args, **kwargs)
        raise ValueError(
            f"{getattr(func, '__name__', func)!r} in module {name or 'the model'!r} reads a parameter that is cut over "
            f"the tensor axis: the plan covers F.linear and F.embedding of the modules it names; name this module in "
            f"the plan, or leave the parameter whole"
        )

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Inside, this code works on pieces itself."""
        with torch._C.DisableTorchFunction(), self.first.paused():
            yield

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
        if self.first.on:
            self.first.check_meets(input, self._parts(style, weight), name, str(style))
        y: Tensor = Row.apply(input, self.weight(weight), self.axis, name)
        return self.first.in_time(y if bias is None else y + self.weight(bias), name)

    def _parts(self, style: Style, weight: Tensor) -> tuple[int, ...]:
        """How much of each part of a cut weight is on this rank."""
        cut = cut_by(style, self.parameters[id(weight)], self.axis.ways)
        return tuple(stop - start for start, stop in cut.ranges(self.axis.index))

    def column(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A whole activation in, a cut one out."""
        siblings = self.parallel.siblings(name)
        y = self._enter(input, site_of(name, self.parallel), siblings).column(weight, bias, siblings.index(name))
        if style.kind == "column":
            fused = max(len(style.parts), style.packed) > 1
            whole = self.parameters[id(weight)][0]
            self.current.replace(cut=CutActivation(whole, y.shape, fused))
            if self.first.on:
                self.first.mark(y, -1, Cut(name, whole, self._parts(style, weight), style.grain))
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
        x = embedding(input, self.weight(weight), size, padding_idx, self.axis, name, whole=whole)
        return x if whole else self.first.in_time(x, name)

    def weight(self, parameter: Any) -> Any:
        """The parameter, or what stands for it."""
        return parameter if self.products is None else self.products.stand_in(parameter)

    def _after_model(self, *call: Any) -> None:
        # the last input of a column would keep a whole activation and its graph
        self.current.replace(column_input=None)
        self.first.ends()

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
        self.first.begins(training=module.training)
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
            return self.first.in_time(cast(Tensor, Split.apply(x, self.axis, name)), name)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            with self._unseen():
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
            with self._unseen():
                return cast(Tensor, Leave.apply(y, axis, name, False))

        if style.kind == "experts":
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
        elif style.kind == "shared":
            last = sum(style.parts) or None

            def shared(module: nn.Module, args: Any, y: Tensor) -> Tensor:
                y = shares(y, last=last)[0]
                self._shares.watch(y, name, style, last)
                return y

            module.register_forward_hook(shared)
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
        with self._unseen():
            y = self.first.in_time(cast(Tensor, Split.apply(y, self.axis, name)), name)
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
