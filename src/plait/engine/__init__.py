"""The engine: units with flat storage, the order of their gathers and reductions, and the step.

Read in this order: ``wrap`` (which parameters travel together), ``unit`` (their storage), ``stage`` (when they are
gathered and freed), ``gradients`` (how gradients reach their owners), ``optim`` (who updates what), ``engine`` (the step).
"""

from plait.engine.engine import Engine, StepResult
from plait.engine.init import empty_parameters

__all__ = ["Engine", "StepResult", "empty_parameters"]
