"""The model that a stage runs, the values that enter and leave it, and its copies of modules, which follow the changes
that a program makes between steps."""

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from crossing_cases import Chain, chain
from engine_cases import WIDTH, batches, distinct, loss_sum
from pipeline_cases import engine_on, linear, on, refused, step
from torch import Tensor, nn

from plait.anymodel import cut
from plait.anymodel.stage_io import HandOverForm, Key, tree_of, value_of
from plait.anymodel.stage_model import ForeignLayer
from plait.comm import Comm
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
    """A parameter beside the blocks."""

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


# ---- copies of modules -----------------------------------------------------------------------------------------------


class Settings(Chain):
    """Reads what a program may set, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__(*(linear() for _ in range(4)))
        self.factor, self.config, self.calls = 1.0, {"factor": 1.0}, 0
        self.register_buffer("replaced", torch.ones(()))
        self.register_buffer("written", torch.ones(()))
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counted += 1
        for link in self.links:
            x = link(x) * self.factor * self.config["factor"]
        return x * self.replaced * self.written / (1 + self.calls + self.counted + self.training)


def as_alone(template: nn.Module, mesh: str, before: Callable[[Any, int], None], **settings: Any) -> list[Any]:
    """Trains it on the mesh too, and returns each rank's model."""

    def body(comm: Comm) -> tuple[list[float], nn.Module]:
        engine, losses = engine_on(copy.deepcopy(template), comm, **settings), []
        for number, batch in enumerate(batches(3)):
            before(engine.model, number)
            losses.append(step(engine, batch, 1).loss)
        return losses, engine.model

    numbers = itertools.count()

    def loss(model: nn.Module, batch: cases.Batch) -> Tensor:
        before(model, next(numbers))
        return loss_sum(model, batch)

    wanted = cases.plain(template, batches(3), loss=loss).losses
    ranks = on(mesh, body)
    for losses, _ in ranks:
        assert losses == pytest.approx(wanted, rel=1e-12)
    return [model for _, model in ranks]


SETTERS: dict[str, Callable[[Any, int], object]] = {
    "a number": lambda model, number: setattr(model, "factor", 1 + number / 4),
    "inside of an attribute": lambda model, number: model.config.update(factor=1 + number / 4),
    "a buffer": lambda model, number: setattr(model, "replaced", torch.tensor(1 + number / 4, dtype=torch.float64)),
    "values of a buffer": lambda model, number: model.written.fill_(1 + number / 4),
    "the mode": lambda model, number: model.train(number != 1),
}


@pytest.mark.parametrize("what", SETTERS)
@pytest.mark.parametrize(("mesh", "order"), [("pipe=2", "1f1b"), ("pipe=2", "zbv"), ("pipe=4", "gpipe")])
def test_what_is_set_between_steps_is_seen_on_every_stage(what: str, mesh: str, order: str) -> None:
    as_alone(distinct(Settings()), mesh, SETTERS[what], schedule=order)


def test_a_module_with_buffers_in_two_blocks_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = chain(linear(), norm, linear(), linear(), norm, linear())
    refused("buffer 'l4.running_mean' is in the blocks 'l1' and 'l4', and each stage would write its own", model)


class OneScale(Chain):
    """Each link is multiplied by one parameter of the model."""

    def __init__(self) -> None:
        super().__init__(*(linear() for _ in range(4)))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x) * self.scale
        return x


@torch.no_grad()
def clamp(model: Any, number: int, data: bool) -> None:
    (model.scale.data if data else model.scale).clamp_(0.4, 0.5 + number)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("row", ["ddp", "zero1"])
def test_a_weight_of_two_stages_is_written_once(data: bool, order: str, row: str) -> None:
    as_alone(distinct(OneScale()), "pipe=2", partial(clamp, data=data), schedule=order, strategy=row)


@pytest.mark.parametrize("split", [(1, 3), (2, 2), (3, 1)])
def test_a_hook_that_is_added_to_a_link_later(split: tuple[int, int]) -> None:
    def add(model: Any, number: int) -> None:
        if number == 1:
            model.l1.register_forward_hook(lambda module, args, output: output / 2)

    as_alone(chain(*(linear() for _ in range(4))), "pipe=2", add, split=split)


class WritesBeside(Chain):
    """Its links add to a tensor that they are all given."""

    class Link(nn.Linear):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            y = super().forward(x)
            total.add_(y.square().sum())
            return y

    def __init__(self) -> None:
        super().__init__(*(self.Link(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for link in self.links:
            x = link(x, total)
        return x + total


def test_a_link_that_writes_beside_its_stream_is_refused() -> None:
    refused("'l0' writes in place to a tensor that it is given besides the stream", distinct(WritesBeside()))


@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zbv"])
def test_a_block_that_is_several_links_runs_again_on_each_stage(order: str) -> None:
    model = nn.Sequential(*[cases.Block()] * 4, linear())
    as_alone(distinct(model), "pipe=2", lambda model, number: None, schedule=order, recompute="full")
