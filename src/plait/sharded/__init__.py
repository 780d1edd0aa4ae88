"""Tensors that are cut over named axes of a mesh and used like any other tensor.  In reading order:

    layout.py          the cut of a tensor over the axes of a mesh, and the way from one cut to another
    spec.py            a rank's knowledge of a tensor without its values: global shape, layout, its box
    rules.py           the table of rules, and the dual table by which no backward ever sends anything
    elementwise.py     rules of operators that act on each element by itself
    algebra.py         rules of products, sums, views and joins
    along.py           rules of torch's own operators that work along some dims: sort, split, fft, linalg
    networks.py        rules of embedding, cross-entropy, attention, norms, convolution
    decompose.py       splits an operator without a rule into its parts
    dispatch.py        finds a call's rule and its decision, or the error that names the way out
    redistribute.py    moves a tensor from layout to layout, forward and backward
    gradients.py       the seed at the loss, and the gradients that a leaf accepts
    spec_tensor.py     the attributes that a ShardedTensor shows
    sharded_tensor.py  ShardedTensor: a local piece that knows its layout; every torch function passes through it
    autograd.py        torch.autograd.backward, grad and hooks
    dropout.py         F.dropout with a mask that no layout changes
    annotate.py        layouts for the parameters of an unmodified module
    explain.py         the messages that a redistribution or an expression would send

A new operator rule is one function under ``@rule`` in the file of its kind, or anywhere in your own code.
"""

from plait.sharded import algebra, along, autograd, dropout, elementwise, networks
from plait.sharded.annotate import annotate
from plait.sharded.dispatch import LayoutError
from plait.sharded.dropout import dropout_stream
from plait.sharded.explain import Explanation, explain
from plait.sharded.sharded_tensor import ShardedTensor, auto_redistribute, redistribute

TABLE_FILES = (elementwise, algebra, along, networks)
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
    "redistribute",
]
