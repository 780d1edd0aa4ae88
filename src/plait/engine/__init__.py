"""The engine: units with flat storage, the order of their gathers and reductions, and the step.

Read in this order:

    wrap        which parameters travel together        build      from a model to units
    unit        their storage                           init, rng  initial values and dropout
    gathering   when they are gathered and freed        exchange   what ranks agree on
    gradients   how gradients reach their owners        guard      a model must stay what it was
    optim       who updates what                        state      whole tensors in and out
    links       a model as a chain, a stage's part      stages     from a model and a pipeline to stages
    door        how the stream enters and leaves        courier    how it travels
    stage       passes of one stage                     tied       weights of several stages
    deferred    weight gradients that wait              costs      what links cost
    runtime     a schedule, carried out                 evaluation the loss without a step
    engine      the step
"""

from plait.engine.engine import Engine
from plait.engine.evaluation import Evaluation
from plait.engine.init import empty_parameters
from plait.engine.step import StepResult

__all__ = ["Engine", "Evaluation", "StepResult", "empty_parameters"]
