"""Tensors cut over named axes, and tensor parallelism.

sharded.py       ShardedTensor: a local piece that knows its layout
rules.py         the table of rules, and the dual table that makes every backward silent
elementwise.py, products.py, reductions.py, views.py, parts.py, networks.py    the rules
redistribute.py  from layout to layout, forward and backward
annotate.py      layouts for the parameters of a module whose code stays as it is
explain.py       what a redistribution or an expression would send
dropout.py       masks that do not depend on the layout
bridge.py        to and from torch's DTensor
"""

from plait.tensor import elementwise, networks, parts, products, reductions, views
from plait.tensor.annotate import annotate
from plait.tensor.bridge import from_dtensor, to_dtensor
from plait.tensor.dispatch import LayoutError
from plait.tensor.dropout import dropout_stream
from plait.tensor.explain import Explanation, explain
from plait.tensor.sharded import ShardedTensor, auto_redistribute, redistribute

TABLE_FILES = (elementwise, networks, parts, products, reductions, views)
"""The modules whose import fills the table of rules."""

__all__ = [
    "Explanation",
    "LayoutError",
    "ShardedTensor",
    "annotate",
    "auto_redistribute",
    "dropout_stream",
    "explain",
    "from_dtensor",
    "redistribute",
    "to_dtensor",
]
