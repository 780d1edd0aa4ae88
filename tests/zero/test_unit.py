"""The parameters that form a unit live in one flat buffer: views without copies, freed at rest, few open at a time."""

from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import ROWS, batches, net
from pipeline_cases import engine_on, step
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.forward.parameter import AtRest
from plait.forward.recompute import blocks_of
from plait.step import Engine
from plait.table.cells import TABLE, moves
from plait.table.flat import lay
from plait.table.mesh import Mesh
from plait.zero.place import write_at_rest
from plait.zero.storage import Flat
from plait.zero.unit import State, Unit
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


def test_layers_of_a_sequential_are_units_also_inside_of_another() -> None:
    convolutions = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert list(laid(wrap(nn.Sequential(*convolutions)))) == ["", "0", "1", "4"]
    inside = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    assert list(laid(wrap(nn.Sequential(nn.Linear(3, 3), inside)))) == ["", "0", "1.0", "1.2"]


def test_every_parameter_is_laid_exactly_once() -> None:
    for model in (cases.Net(), nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))):
        for units in (None, (), callable_names(model)):
            names = [name for group in laid(wrap(model, units)).values() for name in group]
            assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_sequential_in_a_module_list_is_a_block_unless_it_holds_blocks() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU())

    model = nn.Module()
    model.blocks = nn.ModuleList([block(), block()])
    model.stages = nn.ModuleList([nn.Sequential(cases.Block(), block(), nn.Linear(5, 5))])
    assert automatic(model) == ("", "blocks.0", "blocks.1", "stages.0.0", "stages.0.2", "stages.0.1.0", "stages.0.1.1")
    assert blocks_of(model, automatic(model)) == ["blocks.0", "blocks.1", "stages.0.0"]


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


build = partial(engine_on, bucket=0)


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("row", ROWS)
@each_rank("replica=2 shard=2")
def test_parameters_are_views_of_the_flat_buffer_while_they_are_used(comm: Comm, row: str) -> None:
    engine = build(net(), comm, strategy=row)
    unit = next(u for u in engine.placed.units if u.name == "blocks.1")
    seen = []

    def look(module: nn.Module, *_: Any) -> None:
        flat = unit.flats[0]
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            assert parameter.data_ptr() == flat.full.data_ptr() + slot.offset * flat.full.element_size()
            assert parameter.shape == slot.shape and parameter.is_contiguous()
        seen.append(module)

    unit.module.up.register_forward_hook(look)
    unit.module.up.register_full_backward_hook(look)
    step(engine, batches()[0], 1)
    assert len(seen) == 2, "once in forward, once in backward"


@pytest.mark.parametrize("row", ROWS)
@each_rank("shard=2")
def test_parameter_objects_and_names_stay(comm: Comm, row: str) -> None:
    model = net()
    before = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in before.items()}
    engine = build(model, comm, strategy=row)
    for _ in range(2):
        step(engine, batches()[0], 1)
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before), "a parameter is another object now"
        assert {name: p.shape for name, p in after.items()} == shapes
        assert all(p.grad is None for p in after.values()), "gradients live in the flat buffers"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=4", "replica=2 shard=2", "replica=3"])
@each_rank()
def test_at_rest_a_rank_holds_its_piece_and_no_more(comm: Comm, row: str) -> None:
    """Freed memory is given back (the storages are empty), and what the parameters point at is a placeholder."""
    model = net()
    engine = build(model, comm, strategy=row)

    def at_rest() -> None:
        ways = comm.mesh.count(engine.placed.strategy.params.split)
        for unit in engine.placed.units:
            for flat in unit.flats:
                whole = flat.layout.numel * flat.full.element_size()
                assert bytes_of(flat.rest) == whole // ways
                assert bytes_of(flat.full) == (0 if ways > 1 else whole)
                assert flat.kept is None
                for parameter in flat.parameters:
                    assert (bytes_of(parameter) <= 8) == (ways > 1)

    at_rest()
    for batch in batches():
        step(engine, batch, 1)
        at_rest()
    model.eval()
    with torch.no_grad():
        model(batches()[0]["x"])
    at_rest()
    engine.full_state_dict()
    at_rest()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("row", ["zero3", "hsdp", "hpz"])
@each_rank("shard=2")
def test_at_most_one_and_the_prefetched_units_are_open_beside_ancestors(comm: Comm, row: str, prefetch: int) -> None:
    """Counted by the test, from the storages, inside every forward of every module.  Without prefetch backward holds
    one unit, and while its last gradients come the next one: never a third."""
    model = net(6)
    engine = build(model, comm, strategy=row, prefetch=prefetch)
    most = {"forward": 0, "backward": 0}

    def look(way: str, *_: Any) -> None:
        others = engine.placed.units[1:]
        most[way] = max(most[way], sum(any(bytes_of(flat.full) for flat in unit.flats) for unit in others))

    for module in model.modules():
        module.register_forward_pre_hook(partial(look, "forward"))
    for module in [*model.blocks.modules(), *model.head.modules()]:
        module.register_full_backward_pre_hook(partial(look, "backward"))
    for batch in batches():
        step(engine, batch, 2)
    assert most["forward"] == min(1 + prefetch, 8), "the prefetch is used, and kept to"
    assert most["backward"] <= 2 or prefetch


NUMEL = 64
"""Elements of the flat buffer of ``unit_on``: two pieces of 32."""


def unit_on(comm: Comm, row: str) -> Unit:
    strategy = TABLE[row]
    layout = lay([("w", (5, 7)), ("b", (7,))], 8, comm.mesh.data_size)
    parameters = [nn.Parameter(torch.zeros(slot.shape).double()) for slot in layout.slots]
    flat = Flat(layout, parameters, strategy, comm, [None, None], False)
    for index, slot in enumerate(layout.slots):
        write_at_rest(flat, index, torch.arange(slot.numel).view(slot.shape).double())
    return Unit("u", nn.Module(), [flat], moves(strategy), comm)


@pytest.mark.parametrize("row", ["zero3", "zero3_keep", "hpz"])
@each_rank("shard=2")
def test_each_state_has_in_memory_what_the_table_says(comm: Comm, row: str) -> None:
    unit = unit_on(comm, row)
    flat, count = unit.flats[0], unit.open_units
    assert flat.layout.numel == NUMEL
    whole = NUMEL * 8

    def state(expected: State, full: int, shown: bool, kept: bool) -> None:
        assert unit.state is expected
        assert (bytes_of(flat.full), bytes_of(flat.rest)) == (full, whole // comm.mesh.size)
        assert (flat.kept is not None) == kept
        assert all(isinstance(p, AtRest) != shown for p in flat.parameters)
        assert (unit in count.units, count.gathered.now) == (full > 0, full)

    state(State.SHARDED, 0, shown=False, kept=False)
    for kept in (False, True):
        unit.unshard("forward", 0)
        state(State.UNSHARDING, whole, shown=False, kept=kept)
        unit.wait()
        state(State.UNSHARDED, whole, shown=True, kept=kept)
        unit.keep()
        unit.reshard()
        state(State.SHARDED, 0, shown=False, kept=True)
    unit.unshard("backward", 0)
    unit.reshard()  # prefetched, and not needed
    unit.forget()
    state(State.SHARDED, 0, shown=False, kept=False)


@each_rank("shard=2")
def test_a_transition_asserts_the_state_that_it_starts_from(comm: Comm) -> None:
    unit = unit_on(comm, "zero3")
    for wrong in (unit.wait, unit.reshard, unit.keep):
        with pytest.raises(AssertionError, match="unit 'u' is sharded"):
            wrong()
    unit.unshard("forward", 0)
    for wrong in (lambda: unit.unshard("forward", 0), unit.keep):
        with pytest.raises(AssertionError, match="is unsharding"):
            wrong()
    unit.wait()
    for wrong in (lambda: unit.unshard("forward", 0), unit.wait):
        with pytest.raises(AssertionError, match="is unsharded"):
            wrong()
    whole = unit_on(comm, "ddp")
    for wrong in (lambda: whole.unshard("forward", 0), whole.wait, whole.reshard):
        with pytest.raises(AssertionError, match="is whole"):
            wrong()
    assert whole.flats[0].full is whole.flats[0].rest
