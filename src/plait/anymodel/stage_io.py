"""Values as text: a stage's description, for the next one, of the tensors that it hands over.

tensors   [hidden, first]
told      stream     (hidden, None)           the last block's return value, with its containers
          values     first is the output of embed      read by later stages besides the stream
more      returned   embed: fp32 [2, 7, 16], ...       the return values of modules that later stages don't have
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm.header import Shape
from plait.pipeline.message import MessageForm, coded, decoded
from plait.torch_private import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

Tree = Any
"""A value in JSON: its containers as torch writes them ('' for a tensor), and its leaves, with tensors as numbers."""

PLAIN = (type(None), bool, int, float, str)


class Key(NamedTuple):
    """The name of a tensor in a forward: a leaf of a module's output, or of a link's arguments if ``given``."""

    module: str
    call: int
    """The number of the module's call."""
    leaf: int
    given: bool = False


@dataclass(frozen=True)
class HandOverForm:
    """Describes the tensors of a hand-over."""

    shapes: tuple[Shape, ...]
    stream: Tree = field(default_factory=lambda: ["", [{"tensor": 0}]])
    values: Mapping[Key, int] = field(default_factory=dict)
    """The numbers of tensors that travel besides the stream."""
    returned: Mapping[str, list[tuple[Tree, list[Shape]]]] = field(default_factory=dict, compare=False)
    """The return values of each module of an earlier stage, call by call."""

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules of whose outputs a tensor travels besides the stream."""
        return frozenset(key.module for key in self.values if not key.given)

    @cached_property
    def message(self) -> MessageForm:
        """The form of the message."""
        values = [[*key, number] for key, number in self.values.items()]
        returned = {name: [(tree, coded(shapes)) for tree, shapes in calls] for name, calls in self.returned.items()}
        return MessageForm(self.shapes, json.dumps([self.stream, values]), json.dumps(returned))

    @classmethod
    def read(cls, form: MessageForm) -> "HandOverForm":
        stream, values = json.loads(form.told)
        return cls(
            form.shapes,
            stream,
            {Key(*key): number for *key, number in values},
            {name: [(tree, decoded(calls)) for tree, calls in each] for name, each in json.loads(form.more).items()},
        )


def tree_of(value: Any, tensors: list[Tensor]) -> Tree:
    """Converts a value to a tree; adds each of its tensors to the list once.

    Raises:
        ValueError: it contains something other than dense tensors, numbers, text and containers of these.
    """
    if isinstance(value, Tensor):
        return ["", [{"tensor": number_of(value, tensors)}]]
    leaves, spec = tree_flatten(value)
    told = [{"tensor": number_of(leaf, tensors)} if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        if not (wrong := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]):
            if treespec_loads(text := treespec_dumps(spec)) == spec:
                return [text, told]
            wrong = [f"{type(value).__name__} with keys that are no numbers or texts"]
    except (
        NotImplementedError,
        TypeError,
    ) as error:  # a class registered without a name, or a key of another kind
        wrong = [f"{type(value).__name__} ({error})"]
    raise ValueError(
        f"{wrong[0]}: from stage to stage go tensors, numbers, text and None, in tuples, lists, dicts and classes that "
        f"torch knows by a name: torch.export.register_dataclass(cls, serialized_type_name=...)"
    )


def number_of(tensor: Tensor, tensors: list[Tensor]) -> int:
    """The index of a tensor in the list; adds a new tensor.  Raises ValueError if it is not dense."""
    for number, known in enumerate(tensors):
        if known is tensor:
            return number
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"a {kind} tensor: from stage to stage go dense ones, so let to_dense() or to_padded_tensor() make it one, "
            f"or hand on its parts"
        )
    tensors.append(tensor)
    return len(tensors) - 1


def value_of(tree: Tree, tensors: Sequence[Any]) -> Any:
    """Converts a tree back to its value."""
    text, told = tree
    leaves = [tensors[leaf["tensor"]] if isinstance(leaf, dict) else leaf for leaf in told]
    return tree_unflatten(leaves, treespec_loads(text)) if text else leaves[0]
