"""Tensor parallelism in the engine: the axis of a stage, hooks on its model, and the slices of dropout masks.

Cut weights carry out their products themselves (see ``tensor.cut_weight``).  They find a microbatch's state in the
forward's context, so recomputations and several microbatches under way each use their own.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.comm.texts import same_tensors
from plait.forward.context import CurrentForward, CutActivation
from plait.forward.masks import Slice
from plait.forward.stays import StaysHere
from plait.table.collectives import Note
from plait.tensor import Parallel, TensorAxis
from plait.tensor.axis import AXES, NOTHING, Later
from plait.tensor.cut_weight import place
from plait.torch_private import tree_leaves


def _in_context(field: str) -> Any:
    """Returns a property that reads and writes a field of the running forward's context."""
    return property(
        lambda self: getattr(self.current.context, field),
        lambda self, value: self.current.replace(**{field: value}),
    )


class StageAxis(TensorAxis):
    """The tensor axis for the forwards of a stage: the context has the state of the running microbatch."""

    microbatch, length, entered = map(_in_context, ("microbatch", "length", "column_input"))
    whole_logits, unsplit = map(_in_context, ("whole_logits", "unsplit"))
    in_loss_fn = False

    def __init__(self, comm: Comm, current: CurrentForward, *, sequence: bool) -> None:
        self.current = current
        super().__init__(comm, sequence=sequence)

    @property
    def sequence(self) -> bool:
        return self._sequence and not self.unsplit

    @sequence.setter
    def sequence(self, sequence: bool) -> None:
        self._sequence = sequence

    @property
    def running(self) -> bool:  # type: ignore[override]
        return self.in_loss_fn or self.current.context.module.outer is not None

    @property
    def module(self) -> str:
        """The name of the running module."""
        return self.current.context.module.name

    def left(self, width: int, shape: torch.Size = NOTHING, *, fused: bool = False) -> None:
        self.current.replace(cut=CutActivation(width, shape, fused))

    def later(self, parameter: Tensor) -> Later | None:
        stand_ins: Any = self.current.context.stand_ins
        if stand_ins is None:
            return None
        waiting: Later = stand_ins.setdefault(id(parameter), []) if parameter.requires_grad else []
        return waiting


class StageTensor(StaysHere):
    """A stage's model under its plan: sets up its cut weights, and prepares each forward."""

    def __init__(self, model: nn.Module, parallel: Parallel, axis: StageAxis) -> None:
        self.parallel, self.axis, self.current = parallel, axis, axis.current
        self._same_inputs = self._warned = False
        self._columns_in = {name.rpartition(".")[0] for name, s in parallel.styles.items() if s.enters}
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model, always_call=True)
        place(model, parallel, axis)

    def _after_model(self, *call: Any) -> None:
        # the last input of a column would keep a whole activation and its graph
        self.current.replace(column_input=None)

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
                f"{comm.rank} reads the batch of data rank {comm.data_rank}"
            )
        self._same_inputs = True

    def slice_of(self, name: str, shape: Sequence[int]) -> Slice | None:
        """Returns the slice of its whole activation for which a module draws dropout; None: the whole.  Raises
        ValueError where the plan does not say how the activation is cut."""
        style, cut = self.parallel.styles.get(name), self.current.context.cut
        kind = style.kind if style and style.kind in ("hidden", "heads", "whole", "sequence") else ""
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
