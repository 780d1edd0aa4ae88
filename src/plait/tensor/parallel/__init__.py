"""Tensor and sequence parallelism on plain local tensors: what the engine runs.

axis.py        the tensor axis seen from one rank: gathers and sums along a dim, issued and finished
linear.py      column- and row-cut products with their communication, forward and backward
vocabulary.py  embedding and cross-entropy over a cut vocabulary
plan.py        from a model and a plan to cuts, sites and roles
"""

from plait.tensor.parallel.axis import TensorAxis
from plait.tensor.parallel.plan import Parallel, parallel_plan, plan_of
from plait.tensor.parallel.vocabulary import cross_entropy_sum

__all__ = ["Parallel", "TensorAxis", "cross_entropy_sum", "parallel_plan", "plan_of"]
