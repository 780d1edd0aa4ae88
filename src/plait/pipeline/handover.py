"""What a stage hands to the next: tensors, and the form that says what they are.

    tensors   [hidden, first]
    form      stream     (hidden, None)           what the stage's last link returned, with its containers
              values     first is what embed returned      what else later stages read
              returned   embed: fp32 [2, 7, 16], ...       what modules returned that later stages don't have

One tensor travels as it is; several travel as one message of bytes.  The form goes ahead of the first message for the
shapes of a batch, as text, and all later messages have the same.
"""

import dataclasses
import json
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm.header import DTYPES, Shape

Tree = Any
"""A value as JSON has it: tensors by their number, containers by their kind."""

PLAIN = (type(None), bool, int, float, str)
ALIGNED = 16


class Key(NamedTuple):
    """Which tensor of a forward: what a module returned, or what a link is ``given``."""

    module: str
    call: int
    """The how many-th of the module."""
    leaf: int
    given: bool = False


@dataclass(frozen=True)
class HandOverForm:
    """What the tensors of a hand-over are."""

    shapes: tuple[Shape, ...]
    stream: Tree = field(default_factory=lambda: {"tensor": 0})
    values: Mapping[Key, int] = field(default_factory=dict)
    """The numbers of tensors that go besides the stream."""
    returned: Mapping[str, list[tuple[Tree, list[Shape]]]] = field(default_factory=dict, compare=False)
    """Of each module that an earlier stage has, what it returned, call by call."""

    @cached_property
    def modules(self) -> frozenset[str]:
        """Those of which something that they returned goes besides the stream."""
        return frozenset(key.module for key in self.values if not key.given)

    @property
    def packed(self) -> Shape:
        """What travels."""
        if len(self.shapes) == 1:
            return self.shapes[0]
        return (sum(map(_room, self.shapes)),), torch.uint8

    @property
    def text(self) -> str:
        values = [[*key, number] for key, number in self.values.items()]
        returned = {name: [(tree, _coded(shapes)) for tree, shapes in calls] for name, calls in self.returned.items()}
        return json.dumps([_coded(self.shapes), self.stream, values, returned])

    @classmethod
    def read(cls, text: str) -> "HandOverForm":
        shapes, stream, values, returned = json.loads(text)
        return cls(
            tuple(_decoded(shapes)),
            stream,
            {Key(*key): number for *key, number in values},
            {name: [(tree, _decoded(calls)) for tree, calls in each] for name, each in returned.items()},
        )

    def __str__(self) -> str:
        return shapes_in_words(self.shapes)


class HandOver(NamedTuple):
    """What one stage hands to the next for a microbatch."""

    tensors: list[Tensor]
    form: HandOverForm


def shape_of(tensor: Tensor) -> Shape:
    return tuple(tensor.shape), tensor.dtype


def shapes_in_words(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in shapes)


def _coded(shapes: Sequence[Shape]) -> list[Any]:
    return [[list(shape), DTYPES.index(dtype)] for shape, dtype in shapes]


def _decoded(coded: Sequence[Any]) -> list[Shape]:
    return [(tuple(shape), DTYPES[code]) for shape, code in coded]


# ---- one message ----------------------------------------------------------------------------------------------


def _room(shape: Shape) -> int:
    """Bytes, up to the next multiple of ``ALIGNED``."""
    return -(-math.prod(shape[0]) * shape[1].itemsize // ALIGNED) * ALIGNED


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors in one: itself if there is one, else bytes."""
    if len(tensors) == 1:
        return tensors[0].resolve_conj().resolve_neg().contiguous()
    sizes = [_room(shape_of(tensor)) for tensor in tensors]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for tensor, part in zip(tensors, packed.split(sizes), strict=True):
        part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return packed


def unpack(packed: Tensor, form: HandOverForm) -> list[Tensor]:
    """The tensors again, each with memory of its own."""
    if len(form.shapes) == 1:
        return [packed]
    parts = zip(packed.split([_room(shape) for shape in form.shapes]), form.shapes, strict=True)
    return [part[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes).clone() for part, (sizes, dtype) in parts]


# ---- values as trees ------------------------------------------------------------------------------------------


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


def value_of(tree: Tree, tensors: Sequence[Tensor]) -> Any:
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


def difference(before: Tree, now: Tree) -> tuple[Tree, Tree] | None:
    """The first place in which two trees differ: what stands there in each."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys() != {"tensor"}:
        before, now = list(before.values()), list(now.values())
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return next((found for pair in zip(before, now, strict=True) if (found := difference(*pair))), None)
    same = before == now or (before != before and now != now)  # a NaN and a NaN are the same
    return None if same else (before, now)


def words_for(tree: Tree) -> str:
    """A tree in a message."""
    if isinstance(tree, list):
        return f"{len(tree)} values"
    if not isinstance(tree, dict):
        return repr(tree)
    ((kind, content), *_) = tree.items()
    match kind:
        case "tensor":
            return f"tensor {content}"
        case "class":
            return f"a {content.partition(':')[2]}"
    return f"a {kind} of {len(content)}"


def _place_of(kind: type) -> str:
    """Where another rank finds a class."""
    if "<locals>" in kind.__qualname__:
        raise ValueError(f"{kind.__qualname__}: another rank finds no class that is defined in a function")
    return f"{kind.__module__}:{kind.__qualname__}"
