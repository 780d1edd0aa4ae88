"""The links of a model that names none, and the links before which everything else runs."""

from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import distinct
from pipeline_cases import linear, refused, same
from torch import Tensor, nn

from plait.anymodel.split_points import split_points


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tail, self.start = nn.Linear(2, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(2))


class Plain(Base):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(self.start(x) if x is None else x)
        return self.tail(x) * self.weight


class Nested(Base):
    def forward(self, x: Tensor) -> Any:
        return self.tail(self.run(self.start(x) * self.weight))

    def run(self, x: Tensor) -> Any:
        return [x := block(x) for block in self.blocks][-1]


class Indexed(Base):
    @property
    def first(self) -> nn.Module:
        return self.start

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x) + self.weight
        return self.tail(x)


class Renamed(Base):
    """Whose first parameter has another name, and it calls something else ``self``."""

    def forward(module, self: Tensor) -> Any:  # noqa: N805
        x = module.ahead(self.tail(1) if self.dim() == 3 else self)
        for block in module.blocks:
            x = block(x)
        return module.tail(x) * module.weight

    ahead = lambda this, x: this.start(x)  # noqa: E731


class Kept(Base):
    """Its forward, and a method that this calls, are set on the object."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.behind = self.run, self.end

    def run(self, x: Tensor) -> Any:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.behind(x)

    def end(self, x: Tensor) -> Any:
        return self.tail(x) * self.weight


class Listed(Base):
    """Has its modules a second time, unregistered."""

    def __init__(self) -> None:
        super().__init__()
        self._order, self.ends = list(self.blocks), {"first": (self.start,), "last": self.tail}

    def forward(self, x: Tensor) -> Any:
        last = self.ends["last"]
        for block in self._order:
            x = block(x)
        return last(x) * self.weight


class Silent(Base):
    forward = None


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = Nested(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.base(x)) + self.base.start.bias


@pytest.mark.parametrize(
    "model, outside",
    [
        (Plain(), {"start": {0, 1, 2, 3}, "tail": {3}, "weight": {3}}),
        (Nested(), {"start": {0}, "tail": {3}, "weight": {0}}),
        (Indexed(), {"start": {0}, "tail": {3}, "weight": {0, 1, 2, 3}}),
        (Renamed(), {"start": {0}, "tail": {3}, "weight": {3}}),
        (Kept(), {"start": {0}, "tail": {3}, "weight": {3}}),
        (Listed(), {"start": {0}, "tail": {0}, "weight": {3}}),
        (Silent(), {"start": {0}, "tail": {0}, "weight": {0, 1, 2, 3}}),
        (Wrapped(), {"base.start": {0, 3}, "base.tail": {3}, "base.weight": {0}, "head": {3}}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stands_outside_of_the_links(model: nn.Module, outside: dict[str, set[int]]) -> None:
    chain = split_points(model)
    prefix = "base." if isinstance(model, Wrapped) else ""
    assert chain.names == tuple(f"{prefix}blocks.{i}" for i in range(3))
    assert {name: set(before) for name, before in chain.outside.items()} == outside


def test_a_forward_on_the_object_that_knows_the_whole_model_is_refused() -> None:
    model = Wrapped()
    model.base.forward = model.base.run
    split_points(model)
    model.base.forward = partial(model.base.run)
    with pytest.raises(ValueError, match=r"forward of 'base' is set on the object, to a partial that .*MethodType"):
        split_points(model)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ("blocks", r"pipeline_links\(\) of Plain names 'b', which is no module"),
        ([nn.Linear(2, 2)], "names Linear"),
        ([], "that returns the names of its modules in the order in which they run"),
    ],
)
def test_links_that_are_no_names_are_refused(links: Any, words: str) -> None:
    model = Plain()
    for model.pipeline_links in (lambda: links, links):
        with pytest.raises(ValueError, match=words):
            split_points(model)


def test_a_stage_has_its_links_and_what_runs_before_them() -> None:
    chain = split_points(Indexed())
    assert [chain.on_stage(links) for links in (range(1), range(1, 2), range(2, 3))] == [
        {"blocks.0", "start", "weight"},
        {"blocks.1", "weight"},
        {"blocks.2", "tail", "weight"},
    ]


def test_the_outermost_list_with_the_most_parameters_is_the_chain() -> None:
    model = cases.Net()
    model.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(9))
    model.blocks[0].inside = nn.ModuleList(nn.Linear(50, 50) for _ in range(5))
    assert split_points(model).names == ("blocks.0", "blocks.1", "blocks.2")


def test_a_plan_that_names_what_is_not_there_is_left() -> None:
    class Config:
        base_model_pp_plan = {"embed_tokens": (), "layers": ()}  # noqa: RUF012

    model = Base()
    model.config = Config()
    assert split_points(model).names == ("blocks.0", "blocks.1", "blocks.2")


def test_a_buffer_that_several_stages_would_change_is_refused() -> None:
    model = Indexed()
    model.weight = None
    model.start = nn.BatchNorm1d(2)
    assert split_points(model).outside["start"] == {0}
    wrapped = Wrapped()
    wrapped.base.start = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"'base.start.running_mean' belongs to no link .* runs in several places"):
        split_points(wrapped)


def test_the_entries_of_lists_in_a_list_are_links() -> None:
    """Nothing calls a list, so its entries are looked into."""
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2 + i)) for i in range(2))
    assert split_points(model).names == ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "stages.1.2")


class Pairs(nn.Module):
    """Layers as pairs of modules in lists, as in many models of transformers that are written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head = linear()
        self.layers = nn.ModuleList(nn.ModuleList([linear(), cases.Block()]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:
            x = torch.tanh(first(x)) + x
            x = second(x) + x
        return self.head(x)


@pytest.mark.parametrize(("mesh", "order"), [("pipe=2", "1f1b"), ("pipe=3", "zb_h1"), ("pipe=2", "interleaved")])
def test_layers_that_are_pairs_are_cut_between_any_two(mesh: str, order: str) -> None:
    same(distinct(Pairs()), mesh, "ddp", schedule=order)


def test_none_is_no_link_and_runs_nowhere() -> None:
    model = Indexed()
    model.blocks.insert(1, None)
    model.options = nn.ModuleList([None, nn.Linear(2, 2), None])
    model.register_parameter("bias", None)
    model.register_module("extra", None)
    chain = split_points(model)
    assert chain.names == ("blocks.0", "blocks.2", "blocks.3")
    assert set(chain.outside) == {"start", "tail", "weight", "options.1"}


class Again(nn.Module):
    """Its links also stand in a ``Sequential``, of which some run once more."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Sequential(linear(), nn.Tanh()), nn.Sequential(linear()))
        self.blocks, self.more = nn.ModuleList(self.encoder), more

    def forward(self, x: Tensor) -> Any:
        for block in (*self.blocks, *self.encoder[: self.more]):
            x = block(x)
        return x

    def pipeline_links(self) -> list[str]:
        return ["blocks.0", "blocks.1"]


def test_a_link_that_runs_again_is_refused_or_right() -> None:
    """Its own stage refuses it by its order; on another stage it is a tied weight."""
    same(distinct(Again(1)), "pipe=2")
    refused("link 'blocks.1' ran where no more was to come", distinct(Again(2)))
