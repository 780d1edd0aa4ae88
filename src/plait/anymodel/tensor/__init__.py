"""Tensor plans of models as they come.  In reading order:

functions.py      how activations travel around code that works on pieces
kinds.py          the styles of such code: hooks on its module, and its sites
plan.py           plans with these styles, and those that Hugging Face models carry
first_forward.py  the first forward, followed; a plan of this wing has it on
follow.py         what is cut, followed through the operators of a forward
marks.py          which dims of an activation are cut, and how that comes through a view
refusals.py       messages for an operator that takes a part for the whole
shares.py         gradients that a plan adds up, though every rank has them whole
passing.py        what passes a plan's sites, seen in a forward of the plain model
types.py          how activations are cut between modules, shown by ``plait explain``
"""

from plait.anymodel.tensor.plan import ModelPlan, plan_of, resolve_carried

__all__ = ["ModelPlan", "plan_of", "resolve_carried"]
