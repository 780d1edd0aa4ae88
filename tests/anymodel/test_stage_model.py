"""The model that a stage runs, and the values that enter and leave it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.anymodel import cut
from plait.anymodel.stage_io import HandOverForm, Key, tree_of, value_of
from plait.anymodel.stage_model import ForeignLayer
from plait.pipeline.message import shape_of
from plait.pipeline.not_here import NotHere


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


def part_of(model: nn.Module, here: range, device: str = "cpu") -> nn.Module:
    return cut(model).part(here, set(), torch.device(device)).model


def test_a_foreign_layer_has_the_attributes_of_its_link_and_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].kind = "full attention"
    passage = part_of(model, range(1, 2))[0]
    assert isinstance(passage, ForeignLayer) and not [*passage.parameters()]
    assert (passage.kind, passage.in_features) == ("full attention", 5)
    assert isinstance(passage.weight, NotHere) and passage.weight.shape == (5, 5)
    with pytest.raises(AttributeError, match="'missing' is asked of a part of the model that another stage has"):
        _ = passage.missing


def test_a_foreign_layer_has_what_its_modules_have_inside() -> None:
    """Vision models ask their embedding for a dtype; what is inside runs on the other stage alone."""
    inner = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Identity()).to(torch.bfloat16)
    model = nn.Sequential(inner, nn.Linear(5, 5))
    passage = part_of(model, range(1, 2))[0]
    conv = getattr(passage, "0")
    assert conv.weight.dtype is torch.bfloat16 and conv.kernel_size == (2, 2)
    assert not [*passage.parameters()] and not [*passage.children()]
    assert not hasattr(passage, "missing") and not hasattr(conv, "device")
    with pytest.raises(ValueError, match="a Conv2d is called, which is inside of a link"):
        conv(torch.zeros(1, 3, 4, 4))


class Placed(nn.Module):
    """A parameter of its own beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.blocks = nn.Parameter(torch.ones(4)), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = x_BC + self.places
        for block in self.blocks:
            x_BC = block(x_BC)
        return x_BC


def test_what_stands_for_parameters_is_where_the_stage_computes() -> None:
    """A GPU refuses tensors of the CPU beside its own."""
    model = Placed()
    part = part_of(model, range(1, 2), "meta")
    assert part.places.device.type == "meta"
    assert part.blocks[0].weight.device.type == "meta"
