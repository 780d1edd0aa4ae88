"""The stand-ins for the modules and parameters of other stages in an unmodified model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.anymodel import cut
from plait.anymodel.stage_model import ForeignLayer
from plait.pipeline.not_here import NotHere


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
