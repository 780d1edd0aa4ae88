"""Tensor parallelism for stock modules: their code runs unchanged on cut parameters.

A function mode sees every torch function of the model's forward.  ``F.linear`` and ``F.embedding`` on a cut weight are
carried out by ``plait.tensor.parallel`` in the style that the plan gives the running module; anything else that reads a
cut parameter raises, for it would compute with a piece as if it were the whole.

It also knows which activations are cut, so that dropout draws the right slice of the single process's mask.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.core.collectives import Note
from plait.core.layout import Layout
from plait.core.styles import CUT_DIM, Style
from plait.engine.deferred import Deferred
from plait.engine.rng import Slice, Streams
from plait.engine.watch import reads
from plait.tensor.parallel import Parallel, TensorAxis
from plait.tensor.parallel.axis import AXES, Gather, Split
from plait.tensor.parallel.linear import Entered, Row
from plait.tensor.parallel.plan import COLUMNS, site_of
from plait.tensor.parallel.vocabulary import embedding
from plait.tensor.sharded import ShardedTensor

NORMS = {"layer_norm", "rms_norm"}
MIXES = {
    *NORMS,
    *("softmax", "log_softmax", "logsumexp", "cumsum", "sum", "mean", "var", "std", "norm", "vector_norm"),
    *("max", "min", "amax", "amin", "argmax", "argmin", "normalize", "cross_entropy", "mse_loss"),
}
"""Functions that mix the last dim of their first argument."""


class TensorParallel(TorchFunctionMode):
    """Runs a model's cut modules; on as long as the streams are.

    Args:
        model: its cut parameters hold this rank's pieces already.
        parallel: the plan, resolved on this model before its parameters were cut.
        sizes: the whole shape of every cut parameter, by ``id``.
        streams: tells which module runs, and is told which slice of a mask it draws.
        deferred: tells what stands for a parameter where weight gradients are made in a pass of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallel,
        sizes: Mapping[int, tuple[int, ...]],
        axis: TensorAxis,
        streams: Streams,
        deferred: Deferred | None = None,
    ) -> None:
        super().__init__()
        self.modules = dict(model.named_modules())
        self.parallel, self.sizes, self.axis, self.streams = parallel, sizes, axis, streams
        self.deferred = deferred
        self._entered: Entered | None = None
        self._hidden = 0
        """Width, whole, of what the last column-cut module left; 0 where activations are whole again."""
        self._cut_shape, self._fused = torch.Size(), False
        self._same_inputs = False
        self._gathers_logits = False
        self._columns_in = {name.rpartition(".")[0] for name, s in parallel.styles.items() if s.kind in COLUMNS}
        streams.slice_of = self.slice_of
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model, always_call=True)
        for name, style in parallel.styles.items() if axis.sequence else ():
            if style.kind in ("enter", "split"):
                self.modules[name].register_forward_pre_hook(self._changes_input(name, style.kind), with_kwargs=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._hidden:
            self._check_cut_activation(func, args, kwargs)
        if not reads(func, args, kwargs, self.sizes):
            return func(*args, **kwargs)
        name = self.streams.modules[-1] if self.streams.modules else ""
        style = self.parallel.styles.get(name)
        if style is not None and style.kind in CUT_DIM:
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
        """Raises ValueError where a function mixes the features of what a column left, of which a rank has a part."""
        x = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", "")
        if not isinstance(x, Tensor) or not (name in MIXES or func is F.linear):
            return
        with torch._C.DisableTorchFunction():
            if x.shape != self._cut_shape:
                return
        where = self.streams.modules[-1] if self.streams.modules else "the model"
        if (style := self.parallel.styles.get(where)) is not None and style.kind == "whole":
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 and name not in NORMS else None)
        over = {None} if name in NORMS or dim is None else set(dim) if isinstance(dim, tuple | list) else {dim}
        if name == "linear":
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if id(weight) in self.sizes:
                return
            what, fix = "multiplies", f"say 'row' for {where!r} in the tensor plan"
        elif over & {None, -1, x.dim() - 1}:
            what, fix = "mixes", "gather it first ('gathered' instead of 'column'), or leave the module whole"
        else:
            return
        raise ValueError(
            f"{name!r} in module {where!r} {what} {x.size(-1)} of the {self._hidden} features that a column-cut module "
            f"left on this rank: between a column and its row only element-wise functions are right; {fix}; or say "
            f"'whole' for {where!r}, if what it works on is another tensor of this shape"
        )

    # ---- products -----------------------------------------------------------------------------------------------

    def _linear(self, name: str, style: Style, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        axis = self.axis
        if input.size(-1) != weight.size(1):
            wants = "what a column left" if style.kind == "row" else "a whole activation"
            raise ValueError(
                f"{name!r}, {str(style)!r} in the tensor plan, reads {input.size(-1)} features where its weight on "
                f"this rank has {weight.size(1)}: it wants {wants}; see what the plan says of the module before it"
            )
        if style.kind == "row":
            self._hidden = 0
            y: Tensor = Row.apply(input, self._weight(weight), axis, name)
            return y if bias is None else y + self._weight(bias)
        siblings = self.parallel.siblings(name)
        y = self._enter(input, site_of(name, self.parallel), siblings).column(weight, bias, siblings.index(name))
        size = self.sizes[id(weight)][0]
        if style.kind == "column":
            self._hidden, self._cut_shape, self._fused = size, y.shape, len(style.parts) > 1
            return y
        if style.kind == "gathered" or self._gathers_logits:
            whole: Tensor = Gather.apply(y, axis, size, name)
            return whole
        layout = Layout(((),) * (y.dim() - 1) + (("tensor",),))
        return ShardedTensor(y, layout, axis.comm, (*y.shape[:-1], size))

    def _enter(self, input: Tensor, site: str, siblings: Sequence[str]) -> Entered:
        """What siblings read: entered once, whoever comes first."""
        if self._entered is None or not self._entered.is_of(input, site):
            both = [(self.modules[n].weight, self.modules[n].bias) for n in siblings]
            pairs: list[Any] = [(self._weight(w), None if b is None else self._weight(b)) for w, b in both]
            self._entered = Entered(input, self.axis, site, pairs)
        return self._entered

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
        size, whole = self.sizes[id(weight)][0], self.parallel.splits
        return embedding(input, self._weight(weight), size, padding_idx, self.axis, name, whole=whole)

    def _weight(self, parameter: Any) -> Any:
        """The parameter, or what stands for it."""
        return parameter if self.deferred is None else self.deferred.stand_in(parameter)

    def _before_model(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        gathers = kwargs.get("labels") is not None and not self._gathers_logits
        if gathers:
            warnings.warn(
                "the model computes its own loss from labels=..., so the logits of the whole vocabulary are gathered "
                "on every rank; let plait compute the loss (plait.cross_entropy_sum) and they stay cut",
                stacklevel=2,
            )
        self._gathers_logits = kwargs.get("labels") is not None
        self._hidden = 0
        if not self._same_inputs:
            self._check_inputs((args, kwargs))
            self._same_inputs = True

    def _check_inputs(self, inputs: Any) -> None:
        """Raises ValueError, at the first forward, where the ranks of a tensor group work on different samples."""
        tensors = [t.detach().cpu().resolve_conj().contiguous() for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        mine = zlib.crc32(b"".join(bytes(t.view(-1).view(torch.uint8).numpy().data) for t in tensors))
        comm = self.axis.comm
        every = torch.empty(self.axis.ways, dtype=torch.int64, device=comm.device)
        comm.all_gather(every, every.new_tensor([mine]), AXES, note=Note("setup")).wait()
        if len(set(every.tolist())) > 1:
            raise ValueError(
                f"the ranks of a tensor group bring different batches: they work on the same samples, so rank "
                f"{comm.rank} reads the batch of data rank {comm.mesh.data_rank(comm.rank)}"
            )

    def _changes_input(self, name: str, kind: str) -> Callable[..., Any]:
        """A hook that hands a module its stream whole (``enter``) or cut in time (``split``)."""
        siblings = self._columns(name)

        def stream(x: Tensor) -> Tensor:
            if kind == "enter":
                return self._enter(x, name, siblings).tensor
            cut: Tensor = Split.apply(x, self.axis, name)
            return cut

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            with torch._C.DisableTorchFunction():
                if args:
                    return (stream(args[0]), *args[1:]), kwargs
                return args, kwargs | {"hidden_states": stream(kwargs["hidden_states"])}

        return hook

    def _columns(self, name: str) -> list[str]:
        """The column-cut children of a module, in order."""
        return [n for n, s in self.parallel.styles.items() if s.kind in COLUMNS and n.rpartition(".")[0] == name]

    def _after_model(self, *call: Any) -> None:
        self._entered = None  # it would keep a whole activation and its graph

    # ---- recomputation ------------------------------------------------------------------------------------------

    def mark(self) -> tuple[Any, ...]:
        """Where the forward stands: what is cut there, and how long the stream is."""
        return self._hidden, self._cut_shape, self._fused, self.axis.length, None

    @contextmanager
    def again(self, mark: tuple[Any, ...]) -> Iterator[None]:
        """In a backward: what runs inside finds what it found behind the mark, and leaves nothing."""
        before = *self.mark()[:-1], self._entered
        self._hidden, self._cut_shape, self._fused, self.axis.length, self._entered = mark
        try:
            yield
        finally:
            self._hidden, self._cut_shape, self._fused, self.axis.length, self._entered = before

    # ---- dropout ------------------------------------------------------------------------------------------------

    def slice_of(self, name: str, shape: Sequence[int]) -> Slice | None:
        """Which slice of its whole activation a module that draws dropout holds; None: it holds the whole.

        Raises:
            ValueError: a module between cut products whose activation nobody described.
        """
        style = self.parallel.styles.get(name)
        kind = style.kind if style and style.kind not in ("enter", "split") else ""
        if not kind and self._hidden:  # between a column and a row
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
            start, _ = self.axis.part(self.axis.length)
            return Slice(1, start, self.axis.length)
        if kind == "heads":
            return Slice(1, self.axis.index * shape[1], self.axis.ways * shape[1])
        if kind == "hidden":
            start, stop = self.axis.part(self._hidden)
            if self._fused or shape[-1] != stop - start:
                raise ValueError(
                    f"module {name!r} draws dropout on {tuple(shape)}, whose last dim is no part of the "
                    f"{self._hidden} features that the last column-cut module left on {self.axis.ways} ranks: "
                    f"name it in the tensor plan as heads, sequence or whole, or draw before the product that is fused"
                )
            return Slice(len(shape) - 1, start, self._hidden)
        return None
