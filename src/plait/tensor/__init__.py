"""Tensor and sequence parallelism on plain local tensors: what the engine runs.  In reading order:

    axis.py                the tensor axis seen from one rank: gathers and sums along a dim, issued and finished
    linear.py              column- and row-cut products with their communication, forward and backward
    vocabulary.py          embedding and cross-entropy over a cut vocabulary
    plan.py                from a model and a tensor plan to cuts, sites and siblings
    transformers.py        the tensor plan that a Hugging Face model carries, in our words
    types.py               how activations lie between modules, shown by ``plait explain``
    passing.py             what passes a plan's sites, seen in a forward of the plain model
    marks.py               which dims of an activation are cut, and how that comes through a view
    follow.py              what is cut, followed through the operators of a forward
    refusals.py            what is said where one of them takes a part for the whole
    shares.py              gradients that a plan adds up, though every rank has them whole
    pieces.py              a rank's piece of a cut parameter, and the whole from all pieces
    gemm.py                who multiplies fp32 matrices on a CPU
    no_double_backward.py  backwards that can be taken once

A new style is a row of ``KINDS`` and one of ``MESSAGES`` in ``table/tensor_plan.py`` (which dim is cut, where it sends
what, which is also the prediction), and a row of ``LINEARS`` in ``forward/tensor_parallel.py`` (what
``F.linear`` does in such a module).  A style that only describes an activation or a parameter is a row of ``KINDS``,
and the line of the engine that reads it.
"""

from plait.tensor.axis import TensorAxis
from plait.tensor.plan import Parallel, parallel_plan, plan_of
from plait.tensor.vocabulary import cross_entropy_sum

__all__ = ["Parallel", "TensorAxis", "cross_entropy_sum", "parallel_plan", "plan_of"]
