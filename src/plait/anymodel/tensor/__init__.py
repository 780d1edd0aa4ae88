"""Tensor plans of unmodified models.  In reading order:

functions.py      sends activations around code that works on pieces
kinds.py          the styles of such code: hooks on its module, and its sites
plan.py           plans with these styles, and those that Hugging Face models carry
"""

from plait.anymodel.tensor.plan import ModelPlan, plan_of, resolve_carried

__all__ = ["ModelPlan", "plan_of", "resolve_carried"]
