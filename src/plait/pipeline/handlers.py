"""The handlers that a stage's forwards need, in the order in which functions pass them (see ``forward.interceptor``).

A stage is built with those that may have work: none looks at parameters at rest where none is cut, and only a schedule
that splits backwards has deferred products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from plait.forward.at_rest import AtRestCheck, Derivatives
from plait.forward.dropout import DropoutRNG, SliceOf
from plait.forward.interceptor import Handler
from plait.forward.products import Products
from plait.forward.random_ops import all_silent, dropout_layers
from plait.forward.recompute import AttentionRecompute
from plait.forward.tensor_parallel import StageAxis, StageTensor
from plait.pipeline.program import StagePart, StageSettings
from plait.tensor import Parallel
from plait.tensor.expert_axis import outside_experts
from plait.tensor.time_axis import StepsOfTime, TimeAxis
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
    slice_of: Any = StageTensor(model, parallel, axis).slice_of if parallel.styles else None
    experts = parallel.experts | {name for name, style in parallel.styles.items() if style.kind == "experts"}
    slice_of = outside_experts(experts, slice_of)
    recomputes, layers = recompute is not None, dropout_layers(model)
    dropout = DropoutRNG(settings.seed, current, slice_of=slice_of, recomputes=recomputes, layers=layers)
    if settings.time_axis is not None:
        dropout.slice_of = partial(_steps_of, settings.time_axis, dropout, slice_of)
    return [*handlers, dropout]


def _steps_of(
    axis: TimeAxis, dropout: DropoutRNG, other: SliceOf | None, name: str, shape: Sequence[int]
) -> StepsOfTime:
    """The steps of time of an activation for which a module draws dropout under a context axis."""
    if dropout.attends:
        return axis.steps_along(len(shape) - 2, shape[-2])
    position = dropout.current.context.position
    steps = None if position is None else axis.steps_of(shape, position.lengths, position.num_samples)
    if steps is None or (other is not None and other(name, shape) is not None):
        raise ValueError(
            f"module {name!r} draws dropout of shape {list(shape)} under context={axis.ways}, and it is not known "
            f"which of its dims is time: draw on [samples, time, ...], not cut by the tensor axis, or leave it out"
        )
    return steps
