"""Values as text: what a stage tells the next about the tensors that it hands over.

tensors   [hidden, first]
told      stream     (hidden, None)           the last block's return value, with its containers
          values     first is what embed returned      read by later stages besides the stream
more      returned   embed: fp32 [2, 7, 16], ...       the return values of modules that later stages don't have
"""

import dataclasses
import json
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm.header import Shape
from plait.pipeline.message import MessageForm, coded, decoded, shapes_in_words

Tree = Any
"""A value as JSON has it: tensors by their number, containers by their kind."""

PLAIN = (type(None), bool, int, float, str)


class Key(NamedTuple):
    """Which tensor of a forward: what a module returned, or what a link is ``given``."""

    module: str
    call: int
    """The how many-th of the module."""
    leaf: int
    given: bool = False


@dataclass(frozen=True)
class HandOverForm:
    """Describes the tensors of a hand-over."""

    shapes: tuple[Shape, ...]
    stream: Tree = field(default_factory=lambda: {"tensor": 0})
    values: Mapping[Key, int] = field(default_factory=dict)
    """The numbers of tensors that go besides the stream."""
    returned: Mapping[str, list[tuple[Tree, list[Shape]]]] = field(default_factory=dict, compare=False)
    """The return values of each module that an earlier stage has, call by call."""

    @cached_property
    def modules(self) -> frozenset[str]:
        """Those of which something that they returned goes besides the stream."""
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

    def __str__(self) -> str:
        return shapes_in_words(self.shapes)


class HandOver(NamedTuple):
    """One microbatch between two stages."""

    tensors: list[Tensor]
    form: HandOverForm


def tree_of(value: Any, tensors: list[Tensor]) -> Tree:
    """A value as a tree; its tensors are added to the list, each once.

    Raises:
        ValueError: something in it is no dense tensor, number, text or container of these.
    """
    if isinstance(value, Tensor):
        return {"tensor": number_of(value, tensors)}
    if isinstance(value, PLAIN):
        return value
    kind = type(value)
    if kind in (list, tuple):
        return {kind.__name__: [tree_of(one, tensors) for one in value]}
    if kind is dict:
        return {"dict": [[tree_of(key, tensors), tree_of(one, tensors)] for key, one in value.items()]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"class": _place_of(kind), "items": [tree_of(one, tensors) for one in value]}
    if dataclasses.is_dataclass(kind):
        slots = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if hasattr(value, f.name)}
        fields = slots | getattr(value, "__dict__", {})
        entries = value if isinstance(value, dict) else {}  # an output of transformers is both
        return {
            "class": _place_of(kind),
            "fields": [[name, tree_of(one, tensors)] for name, one in fields.items()],
            "entries": [[tree_of(key, tensors), tree_of(one, tensors)] for key, one in entries.items()],
        }
    raise ValueError(
        f"{kind.__name__}: from stage to stage go tensors, numbers, text and None, in tuples, lists, dicts and data "
        f"classes"
    )


def number_of(tensor: Tensor, tensors: list[Tensor]) -> int:
    """Where a tensor stands in the list, to which it is added if it is new; ValueError if it is not dense."""
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
    """The value of a tree."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content), *_) = tree.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "list":
            return [value_of(one, tensors) for one in content]
        case "tuple":
            return tuple(value_of(one, tensors) for one in content)
        case "dict":
            return {value_of(key, tensors): value_of(one, tensors) for key, one in content}
    module, _, name = content.partition(":")
    kind = operator.attrgetter(name)(sys.modules[module])
    if "items" in tree:
        return kind(*(value_of(one, tensors) for one in tree["items"]))
    made = kind.__new__(kind)  # its __init__ has run, where it was made
    for name, one in tree["fields"]:
        object.__setattr__(made, name, value_of(one, tensors))
    for key, one in tree["entries"]:
        made[value_of(key, tensors)] = value_of(one, tensors)
    return made


def _place_of(kind: type) -> str:
    """Where another rank finds a class."""
    if "<locals>" in kind.__qualname__:
        raise ValueError(f"{kind.__qualname__}: another rank finds no class that is defined in a function")
    return f"{kind.__module__}:{kind.__qualname__}"
