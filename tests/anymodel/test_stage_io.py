"""Values as text: trees of tensors, numbers and containers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.anymodel.stage_io import HandOverForm, Key, tree_of, value_of
from plait.pipeline.message import shape_of


def test_a_form_goes_in_a_message_and_comes_back() -> None:
    mine = [torch.ones(2), torch.ones(3, 0)]
    tree = tree_of(tuple(mine), [])
    form = HandOverForm(tuple(map(shape_of, mine)), tree, {Key("a", 0, 1, True): 1}, {"a": [(tree, [])]})
    assert HandOverForm.read(form.message) == form and HandOverForm.read(form.message).returned == form.returned


@dataclass
class Box:
    inside: Any
    name: str = ""


@dataclass
class Unnamed:
    inside: Any


torch.export.register_dataclass(Box, serialized_type_name="test_stage_io.Box")
torch.export.register_dataclass(Unnamed)


def test_what_is_not_dense_does_not_go() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor, kind in ((torch.eye(2).to_sparse(), "sparse_coo"), (nested, "nested")):
        with pytest.raises(ValueError, match=f"a {kind} tensor: from stage to stage go dense ones"):
            tree_of([tensor], [])


def test_values_become_trees_and_values_again() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    value = (a, [None, 2, 0.5, "text", True], {"k": b, 3: a}, Box(b, "box"))
    tensors: list[Tensor] = []
    tree = json.loads(json.dumps(tree_of(value, tensors)))
    assert [id(tensor) for tensor in tensors] == [id(a), id(b)], "each once"
    assert value_of(tree, [a, b]) == value and repr(value_of(tree, [a, b])) == repr(value)
    assert value_of(tree, ["a", "b"])[2] == {"k": "b", 3: "a"}
    for wrong in (object(), Unnamed(a), {(1, 2): a}, {torch.float32: a}):
        with pytest.raises(ValueError, match=r"from stage to stage go tensors.*export.register_dataclass"):
            tree_of([wrong], [])
