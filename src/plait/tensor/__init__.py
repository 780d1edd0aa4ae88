"""Tensor and sequence parallelism by cut weights: parameters that multiply in the way of their style.  Reading order:

    axis.py                the tensor axis seen from one rank: gathers and sums along a dim, issued and finished
    linear.py              column- and row-cut products with their communication, forward and backward
    vocabulary.py          embedding and cross-entropy over a cut vocabulary, logits cut in classes
    cut_weight.py          the parameter class that carries out F.linear and F.embedding
    plan.py                from a model and a tensor plan to cuts, sites and siblings
    expert_axis.py         the expert axis: experts on neighbours of shard, and the tokens that travel to them
    time_axis.py           the context axis: steps of time on neighbours of shard, attention to all of them
    ring_attention.py      attention to keys and values that travel in a ring
    pieces.py              a rank's piece of a cut parameter, and the whole from all pieces
    metadata.py            which torch functions read values
    no_double_backward.py  backwards that can be taken once

A new style is a row of ``KINDS`` and one of ``MESSAGES`` in ``table/tensor_plan.py`` (the dim that is cut, and the
messages that it sends, which are also the prediction), and a row of ``LINEARS`` in ``cut_weight.py``.
"""

from plait.tensor.axis import TensorAxis
from plait.tensor.cut_weight import CutWeight, whole
from plait.tensor.plan import Parallel, TensorPlan, parallel_plan, plan_of
from plait.tensor.vocabulary import cross_entropy_sum

__all__ = [
    "CutWeight",
    "Parallel",
    "TensorAxis",
    "TensorPlan",
    "cross_entropy_sum",
    "parallel_plan",
    "plan_of",
    "whole",
]
