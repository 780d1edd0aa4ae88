"""The handlers that a stage's forwards need, in the order in which functions pass them (see ``forward.interceptor``).

A stage is built with those that may have work: none looks at parameters at rest where none is cut, and only a schedule
that splits backwards has deferred products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from plait.forward.at_rest import AtRestCheck, Derivatives
from plait.forward.dropout import DropoutRNG
from plait.forward.interceptor import Handler
from plait.forward.products import Products
from plait.forward.random_ops import all_silent, dropout_layers
from plait.forward.recompute import AttentionRecompute
from plait.forward.tensor_parallel import StageAxis, StageTensor
from plait.pipeline.program import StagePart, StageSettings
from plait.tensor import Parallel
from plait.tensor.time_axis import TimeAxis
from plait.zero.unit import Unit, parameters_of


def stage_handlers(
    settings: StageSettings, part: StagePart, units: Sequence[Unit], parallel: Parallel, axis: StageAxis, *, last: bool
) -> list[Handler]:
    """Returns the handlers of a stage, in order; the ``last`` stage computes the loss."""
    model, current, parameters = part.model, axis.current, list(parameters_of(units))
    recompute, pipelined = settings.parallelism.recompute, settings.count > 1
    handlers: list[Handler] = []
    if recompute == "selective":
        attention = AttentionRecompute(current)
        handlers.append(attention)
        if not pipelined:
            model.register_forward_hook(attention.after_model)
    split = {id(p): p for _, p, flat, _ in parameters if flat.split}
    staged = {id(p) for _, p, _, _ in parameters} if last and pipelined else set()
    if staged or (split and not all_silent(model)):  # torch's own layers read only their own parameters
        handlers.append(AtRestCheck(current, split, staged))
        handlers.append(Derivatives(current, part.blocks.names, opens=bool(split)))
    if settings.split_backward:
        handlers.append(Products(current, [p for _, p, flat, _ in parameters if flat.trainable]))
    of_tensor = StageTensor(model, parallel, axis).slice_of if parallel.styles else None
    dropout = DropoutRNG(settings.seed, current, recomputes=recompute is not None, layers=dropout_layers(model))
    if of_tensor is not None or parallel.experts or settings.time_axis is not None:
        dropout.slice_of = partial(_slice_of, dropout, parallel, of_tensor, settings.time_axis)
    return [*handlers, dropout]


def _slice_of(
    dropout: DropoutRNG, parallel: Parallel, of_tensor: Any, axis: TimeAxis | None, name: str, shape: Sequence[int]
) -> Any:
    """The slice of its whole activation for which a module draws dropout; None: the whole.  Raises ValueError where it
    is not known."""
    experts = parallel.experts | {n for n, style in parallel.styles.items() if style.kind == "experts"}
    if inside := next((one for one in experts if f"{name}.".startswith(f"{one}.")), None):
        raise ValueError(f"{inside!r} draws dropout inside experts, which several ranks share: leave it out")
    if axis is None:
        return of_tensor and of_tensor(name, shape)
    if dropout.attends:
        return axis.steps_along(len(shape) - 2, shape[-2])
    position = dropout.current.context.position
    steps = None if position is None else axis.steps_of(shape, position.lengths, position.num_samples)
    if steps is None or (of_tensor is not None and of_tensor(name, shape) is not None):
        raise ValueError(
            f"module {name!r} draws dropout of shape {list(shape)} under context={axis.ways}, and it is not known "
            f"which of its dims is time: draw on [samples, time, ...], not cut by the tensor axis, or leave it out"
        )
    return steps
