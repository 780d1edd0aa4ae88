"""Tensors that are cut over named axes of a mesh and used like any other tensor.  In reading order:

    spec.py            what a rank knows of a tensor without its values: global shape, layout, its box
    rules.py           the table of rules, and the dual table by which no backward ever sends anything
    elementwise.py     rules of operators that act on each element by itself
    products.py        rules of matrix products: letters in, letters out
    reductions.py      rules of sums, and of what works along whole dims
    views.py           rules of views: the same elements under another shape
    indexing.py        rules of indexing: some of the places of a dim, tensors joined along one
    nn_functional.py   rules of embedding, cross-entropy, attention
    batches.py         rules of torch's own operators that work along some dims: sort, fft, linalg, pools, convolutions
    decompose.py       an operator without a rule as the operators that it is made of
    dispatch.py        from a call to what its rule decides, or to the error that names the way out
    redistribute.py    from layout to layout, forward and backward
    gradients.py       the seed at the loss, and what may be set at a leaf
    spec_tensor.py     what a ShardedTensor shows of itself
    sharded_tensor.py  ShardedTensor: a local piece that knows its layout; every torch function passes through it
    autograd.py        torch.autograd.backward, grad and hooks
    dropout.py         F.dropout whose mask no layout changes
    annotate.py        layouts for the parameters of a module whose code stays as it is
    explain.py         what a redistribution or an expression would send
    bridge.py          to and from torch's DTensor

A new operator rule is one function under ``@rule`` in the file of its kind, or anywhere in your own code.
"""

from plait.sharded import autograd, batches, dropout, elementwise, indexing, nn_functional, products, reductions, views
from plait.sharded.annotate import annotate
from plait.sharded.bridge import from_dtensor, to_dtensor
from plait.sharded.dispatch import LayoutError
from plait.sharded.dropout import dropout_stream
from plait.sharded.explain import Explanation, explain
from plait.sharded.sharded_tensor import ShardedTensor, auto_redistribute, redistribute

TABLE_FILES = (elementwise, products, reductions, views, indexing, nn_functional, batches)
"""The modules whose import fills the table of rules."""

DIRECT_FILES = (autograd, dropout)
"""The modules whose import enters functions that handle ShardedTensors themselves."""

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
