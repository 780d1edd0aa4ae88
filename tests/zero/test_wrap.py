"""The parameters that form a unit: by block or as the user names them; the innermost unit has them."""

from __future__ import annotations

from typing import Any

import engine_cases as cases
import pytest
from torch import nn

from plait import run_threads as run
from plait.forward.recompute import blocks_of
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.zero.wrap import Wrapped, automatic, wrap


def laid(wrapped: tuple[Wrapped, ...]) -> dict[str, list[str]]:
    return {w.name: [name for name, _ in w.parameters] for w in wrapped}


def test_blocks_are_units_and_so_are_matrices_outside_them() -> None:
    found = laid(wrap(cases.Net(2)))
    assert list(found) == ["", "first", "blocks.0", "blocks.1", "head"]
    assert found[""] == ["scale", "norm.weight", "norm.bias"]
    assert found["first"] == ["first.weight", "first.bias"]
    assert found["blocks.1"] == [
        f"blocks.1.{name}" for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    ]


def callable_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]


def test_every_parameter_is_laid_exactly_once() -> None:
    for model in (cases.Net(), nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))):
        for units in (None, (), callable_names(model)):
            names = [name for group in laid(wrap(model, units)).values() for name in group]
            assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_sequential_in_a_sequential_is_opened_up() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    assert list(laid(wrap(model))) == ["", "0", "1.0", "1.2"]


def test_a_sequential_in_a_module_list_is_a_block_unless_it_holds_blocks() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU())

    model = nn.Module()
    model.blocks = nn.ModuleList([block(), block()])
    model.stages = nn.ModuleList([nn.Sequential(cases.Block(), block(), nn.Linear(5, 5))])
    assert automatic(model) == ("", "blocks.0", "blocks.1", "stages.0.0", "stages.0.2", "stages.0.1.0", "stages.0.1.1")
    assert blocks_of(model, automatic(model)) == ["blocks.0", "blocks.1", "stages.0.0"]


def test_a_convolution_net() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert list(laid(wrap(model))) == ["", "0", "1", "4"]


def test_named_units_may_nest_and_the_innermost_has_the_parameter() -> None:
    found = laid(wrap(cases.Net(2), ["blocks.0", "blocks.0.up", "head"]))
    assert list(found) == ["", "blocks.0", "blocks.0.up", "head"]
    assert found["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert "blocks.0.up.weight" not in found["blocks.0"] and "blocks.0.down.weight" in found["blocks.0"]
    assert "blocks.1.up.weight" in found[""]


def test_a_tied_parameter_is_laid_in_the_first_unit_and_borrowed_by_the_other() -> None:
    model = cases.Net(1)
    model.head = nn.Linear(cases.WIDTH, cases.WIDTH, bias=False)
    model.head.weight = model.first.weight
    wrapped = {w.name: w for w in wrap(model)}
    assert [n for n, _ in wrapped["first"].parameters] == ["first.weight", "first.bias"]
    assert wrapped["head"].parameters == () and wrapped["head"].borrows == ("first",)


def embedded() -> nn.Module:
    """A layer of a ``Sequential``, and one of a block, stand in a second container too."""
    embed = nn.Sequential(nn.Tanh(), nn.Linear(cases.WIDTH, cases.WIDTH), nn.LayerNorm(cases.WIDTH))
    blocks = nn.ModuleList(cases.Block() for _ in range(2))
    ups = nn.ModuleList(block.up for block in blocks)
    return cases.Made(lambda m, x: x, embed=embed, blocks=blocks, patches=nn.Sequential(*embed[1:]), ups=ups)


def test_a_module_in_two_containers_is_a_unit_under_its_first_name() -> None:
    model = embedded()
    assert automatic(model) == ("", "embed.1", "embed.2", "blocks.0", "blocks.1", "blocks.0.up", "blocks.1.up")
    names = [name for group in laid(wrap(model)).values() for name in group]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("model", "unit", "words"),
    [
        (cases.Net(2), "blocks.O", r"blocks\.O.*blocks\.0"),
        (cases.Net(2), "blocks", "'blocks' is a ModuleList"),
        (nn.Sequential(nn.ModuleDict({"a": nn.Linear(3, 3)})), "0", "'0' is a ModuleDict"),
    ],
)
def test_names_that_are_no_units_are_refused(model: nn.Module, unit: str, words: str) -> None:
    """A container is never called, so nothing would gather it."""
    with pytest.raises(ValueError, match=words):
        wrap(model, [unit])


@pytest.mark.parametrize(
    ("model", "settings", "message"), [(cases.net, {"prefetch": -1}, "prefetch=-1"), (nn.ReLU, {}, "no parameters")]
)
def test_models_and_settings_that_cannot_be_are_refused(model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Mesh(), lambda comm: Engine(model(), comm, **settings))
