"""The tensors of a batch in any container: torch's pytrees, and objects that a pytree takes for leaves.

tuple, list, dict, a registered class       a pytree
UserDict, transformers' BatchEncoding       a mapping: its values
a dataclass, SimpleNamespace                its fields
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from plait.torch_private import tree_leaves


def batch_tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the batch's tensors in order, and none from objects of other kinds."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from batch_tensors(list(leaf.values()))
        elif isinstance(leaf, SimpleNamespace):
            yield from batch_tensors(list(vars(leaf).values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from batch_tensors([getattr(leaf, one.name) for one in fields(leaf)])
