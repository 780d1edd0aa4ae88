"""The engine: units with flat storage, the order of their gathers and reductions, and the step.

Read in this order:

    wrap        which parameters travel together        build      from a model to units
    unit        their storage                           init, rng  initial values and dropout
    stage       when they are gathered and freed        exchange   what ranks agree on
    gradients   how gradients reach their owners        guard      a model must stay what it was
    optim       who updates what                        state      whole tensors in and out
    engine      the step
"""

from plait.engine.engine import Engine
from plait.engine.init import empty_parameters
from plait.engine.step import StepResult

__all__ = ["Engine", "StepResult", "empty_parameters"]
