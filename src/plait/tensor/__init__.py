"""Tensors cut over named axes, and tensor parallelism.

sharded.py       ShardedTensor: a local piece that knows its layout
rules.py         the table of rules, and the dual table that makes every backward silent
elementwise.py, products.py, reductions.py, views.py, networks.py    the rules
redistribute.py  from layout to layout, forward and backward
annotate.py      layouts for the parameters of a module whose code stays as it is
explain.py       what a redistribution or an expression would send
bridge.py        to and from torch's DTensor
"""

from plait.tensor import elementwise, networks, products, reductions, views
from plait.tensor.sharded import ShardedTensor, auto_redistribute, redistribute
from plait.tensor.spec import LayoutError

__all__ = [
    "LayoutError",
    "ShardedTensor",
    "auto_redistribute",
    "elementwise",
    "networks",
    "products",
    "redistribute",
    "reductions",
    "views",
]
