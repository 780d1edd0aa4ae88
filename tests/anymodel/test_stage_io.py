"""Values as text: trees of tensors, numbers and containers."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from plait.anymodel.stage_io import HandOverForm, Key, tree_of, value_of
from plait.pipeline.message import shape_of


def test_a_form_goes_in_a_message_and_comes_back() -> None:
    mine = [torch.ones(2), torch.ones(3, 0)]
    tree = {"tuple": [{"tensor": 0}, {"tensor": 1}]}
    form = HandOverForm(tuple(map(shape_of, mine)), tree, {Key("a", 0, 1, True): 1}, {"a": [(tree, [])]})
    assert HandOverForm.read(form.message) == form and HandOverForm.read(form.message).returned == form.returned


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Box:
    inside: Any
    name: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    number: int
    half: float = field(init=False)
    never: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self.number / 2)
        object.__setattr__(self, "number", self.number + 1)


@dataclass
class Open(OrderedDict[str, Any]):
    """As the outputs of transformers are."""

    x: Any = None

    def __post_init__(self) -> None:
        self["x"], self.more = self.x, 1


def test_a_data_class_is_rebuilt_and_not_made_again() -> None:
    tensor = torch.ones(2)
    closed, opened = Closed(3), Open(tensor)
    opened["y"] = opened.more = 2
    tree = json.loads(json.dumps(tree_of((closed, opened), tensors := list[Tensor]())))
    closed, again = value_of(tree, tensors)
    assert type(closed) is Closed and (closed.number, closed.half, hasattr(closed, "never")) == (4, 1.5, False)
    assert (
        type(again) is Open and again.x is tensor and again.more == 2 and [*again.items()] == [("x", tensor), ("y", 2)]
    )


def test_what_is_not_dense_does_not_go() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor, kind in ((torch.eye(2).to_sparse(), "sparse_coo"), (nested, "nested")):
        with pytest.raises(ValueError, match=f"a {kind} tensor: from stage to stage go dense ones"):
            tree_of([tensor], [])


def test_values_become_trees_and_values_again() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    value = (a, [None, 2, 0.5, "text", True], {"k": b, 3: a}, Point(a, ()), Box(b, "box"))
    tensors: list[Tensor] = []
    tree = json.loads(json.dumps(tree_of(value, tensors)))
    assert [id(tensor) for tensor in tensors] == [id(a), id(b)], "each once"
    assert value_of(tree, [a, b]) == value and repr(value_of(tree, [a, b])) == repr(value)
    assert value_of(tree, ["a", "b"])[2] == {"k": "b", 3: "a"}

    @dataclass
    class Local:
        x: int = 1

    for wrong in (object(), Local()):
        with pytest.raises(ValueError, match=r"object: from stage to stage go tensors|no class that is defined in"):
            tree_of([wrong], [])
