"""Initial weights: from (seed, module name) on the full shape, so that no layout changes them; values are kept."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import ROWS, SPLIT_ROWS, sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, empty_parameters
from plait.table.mesh import Mesh
from plait.zero.state.init import materialise

WIDTH = cases.WIDTH


class Tied(nn.Module):
    """Embedding and head share one Parameter; two equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(cases.Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 13)
        self.head.weight = self.embed.weight

    def forward(self, index_B: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(index_B)))


def empty(kind: Callable[[], nn.Module] = Tied) -> nn.Module:
    with empty_parameters():
        return kind()


def initial(mesh: str, row: str, seed: int = 0, **settings: Any) -> list[dict[str, Tensor]]:
    def body(comm: Comm) -> dict[str, Tensor]:
        return Engine(empty(), comm, strategy=row, seed=seed, **settings).full_state_dict()

    return run(Mesh.parse(mesh), body)


@pytest.fixture(scope="module")
def single() -> dict[str, Tensor]:
    model = empty()
    materialise(model, 0, torch.device("cpu"))
    return model.state_dict()


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    *((mesh, row, {}) for mesh in ("shard=1", "shard=2", "shard=4", "replica=2 shard=2", "replica=3") for row in ROWS),
    *(("shard=3", "zero3", more) for more in ({"cut": "tensor"}, {"units": ()}, {"units": ("blocks.0.up",)})),
]


@pytest.mark.parametrize(("mesh", "row", "settings"), LAYOUTS)
def test_every_layout_begins_with_the_single_process_bits(
    single: dict[str, Tensor], mesh: str, row: str, settings: dict[str, Any]
) -> None:
    for state in initial(mesh, row, **settings):
        assert list(state) == list(single)
        assert all(torch.equal(state[name], value) for name, value in single.items())


def test_every_layer_its_own_numbers(single: dict[str, Tensor]) -> None:
    assert not torch.equal(single["blocks.0.up.weight"], single["blocks.1.up.weight"])
    assert not torch.equal(single["blocks.0.up.bias"], single["blocks.1.up.bias"])
    assert torch.equal(single["head.weight"], single["embed.weight"]), "tied stays tied"
    assert torch.equal(single["blocks.0.norm.weight"], torch.ones(WIDTH)), "by the module's own initialiser"
    bound = WIDTH**-0.5  # nn.Linear's, by the fan-in of the full matrix
    assert bound * 0.9 < single["blocks.0.up.weight"].abs().max() <= bound
    other = initial("shard=2", "zero3", seed=1)[0]
    assert not torch.equal(other["blocks.0.up.weight"], single["blocks.0.up.weight"])


def test_neither_building_nor_initialising_moves_the_global_generator() -> None:
    before = torch.get_rng_state()
    initial("shard=2", "zero3")
    after = torch.get_rng_state()
    assert torch.equal(before, after) or torch.equal(empty_draws(before), after)


def empty_draws(state: Tensor) -> Tensor:
    """Modules draw in their constructors, before plait can see them: what two builds draw."""
    torch.set_rng_state(state)
    Tied(), Tied()
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    return drawn


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


class Scale(nn.Module):
    """A parameter, and nothing to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), Scale()


class Initialising(nn.Module):
    """Initialises its modules itself, children first, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=100.0)
        elif isinstance(module, Scale):
            nn.init.constant_(module.scale, 3.0)
        elif isinstance(module, Branch):
            nn.init.normal_(module.down.weight, std=0.01)
        elif module is self:
            nn.init.constant_(self.bias, 5.0)


class Around(nn.Module):
    """Holds a model that initialises its modules itself; its own ``_init_weights`` is another thing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Initialising()
        self.head = nn.Linear(WIDTH, 3)

    def _init_weights(self) -> None:
        raise AssertionError("not the initialiser of a module")


def test_the_model_around_a_module_initialises_it() -> None:
    """It overrides reset_parameters; a module's holder comes after it; other values stay."""

    def body(comm: Comm) -> dict[str, Tensor]:
        return Engine(empty(Around), comm, strategy="zero3").full_state_dict()

    model = empty(Around)
    materialise(model, 0, torch.device("cpu"))
    values = model.state_dict()
    assert torch.equal(values["inner.bias"], torch.full((WIDTH,), 5.0))
    for i in range(2):
        at = f"inner.branches.{i}"
        assert 50 < values[f"{at}.up.weight"].std() < 200
        assert 0 < values[f"{at}.down.weight"].abs().max() < 0.1
        assert 0 < values[f"{at}.up.bias"].abs().max() <= WIDTH**-0.5
        assert torch.equal(values[f"{at}.norm.weight"], torch.ones(WIDTH))
        assert torch.equal(values[f"{at}.scale.scale"], torch.full((WIDTH,), 3.0))
    assert not torch.equal(values["inner.branches.0.up.weight"], values["inner.branches.1.up.weight"])
    assert 0 < values["head.weight"].abs().max() <= WIDTH**-0.5
    for state in run(Mesh.parse("replica=2 shard=2"), body):
        assert all(torch.equal(state[name], value) for name, value in values.items())


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Kept(nn.Linear):
    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__(3, 3)
        self.kept = keep(self)


@pytest.mark.parametrize(
    ("context", "build", "message"),
    [
        (empty_parameters(), lambda: [nn.Linear(3, 3), Bare()], r"'1'.*Bare.*weight.*reset_parameters"),
        (empty_parameters(), lambda: [Forgetful(3, 3)], r"'0'.*Forgetful.*meta \(bias\)"),
        (torch.device("meta"), lambda: [nn.BatchNorm1d(3)], r"0\.running_mean.*empty_parameters"),
        (
            empty_parameters(),
            lambda: [Kept(lambda m: weakref.ref(m.bias))],
            r"'0\.bias' .* weak .* build the Engine before",
        ),
        (empty_parameters(), lambda: [Kept(lambda m: m(m.weight))], r"'0\.weight' .* outputs .* or drop them"),
    ],
    ids=["no initialiser", "left out by its initialiser", "a buffer without values", "weakly referred to", "an output"],
)
def test_what_gets_no_values_is_named(context: Any, build: Callable[[], list[nn.Module]], message: str) -> None:
    with context:
        model = nn.Sequential(*build())
    with pytest.raises(ValueError, match=message):
        run(Mesh(), lambda comm: Engine(model, comm))


class Written(nn.Module):
    """A model that gives the parameters of its layers other values than the layers do."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            write(self)


LOST: dict[str, Callable[[Any], object]] = {
    "zeros": lambda m: nn.init.zeros_(m.out.weight),
    "by data": lambda m: m.out.weight.data.normal_(std=0.0072),
    "a row": lambda m: m.out.weight[0].mul_(0.1),
    "another parameter": lambda m: setattr(m.out, "weight", nn.Parameter(torch.zeros(4, 4))),
    "apply": lambda m: m.apply(lambda part: part is m.out and nn.init.eye_(part.weight)),
    "converted afterwards": lambda m: (nn.init.zeros_(m.out.weight), m.bfloat16()),
}
KEPT: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "converted": lambda m: m.bfloat16(),
    "initialised again, as loralib's layers": lambda m: m.out.reset_parameters(),
    "tied": lambda m: setattr(m.out, "weight", m.inner.weight),
    "written, then initialised": lambda m: (nn.init.zeros_(m.out.weight), m.out.reset_parameters()),
    "by torch's attention, also to its inner layer": lambda m: setattr(m, "more", nn.MultiheadAttention(4, 2)),
    "by torch's transformer, to all inside": lambda m: setattr(
        m, "more", nn.Transformer(4, 2, 1, 1, 8, batch_first=True)
    ),
}


@pytest.mark.parametrize("write", LOST)
def test_values_that_building_on_meta_would_lose_are_refused(write: str) -> None:
    model = empty(partial(Written, LOST[write]))
    with pytest.raises(ValueError, match=r"'out.weight' was written to after its Linear had initialised it \(by \w.*"):
        run(Mesh(), lambda comm: Engine(model, comm))


@pytest.mark.parametrize("write", KEPT)
def test_values_of_a_modules_own_initialiser_are_drawn(write: str) -> None:
    materialise(empty(partial(Written, KEPT[write])), 0, torch.device("cpu"))


class DrawnTwice(nn.Module):
    """A layer that draws in its constructor, in a model that draws it again: GPT-2's Conv1D."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            nn.init.ones_(self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.Layer()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, self.Layer):
            nn.init.normal_(module.weight)


@pytest.mark.parametrize("build", [empty_parameters, partial(torch.device, "meta")], ids=["empty", "meta"])
def test_a_cast_after_building_loses_no_note_of_what_was_written(build: Callable[[], Any]) -> None:
    with build():
        right, wrong = DrawnTwice(), Written(LOST["zeros"])
    for model in (right, wrong):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    materialise(right, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'out.weight' was written to after"):
        materialise(wrong, 0, torch.device("cpu"))


class TiedLikeGpt2(nn.Module):
    """Both modules that share the weight give it the same kind of values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


@pytest.mark.parametrize("context", [empty_parameters, partial(torch.device, "meta")])
def test_a_tied_weight_that_both_modules_initialise_is_drawn(context: Callable[[], Any]) -> None:
    with context():
        model = TiedLikeGpt2()
    materialise(model, 0, torch.device("cpu"))
    assert model.head.weight is model.embed.weight
    assert 0 < model.head.weight.abs().max() < 0.2


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_replicas_that_differ_are_refused_on_every_rank(row: str) -> None:
    heard = []

    def body(comm: Comm) -> None:
        model = cases.net()
        if comm.rank == 2:
            with torch.no_grad():
                model.blocks[1].up.weight[3, 2] += 1e-9
        try:
            Engine(model, comm, strategy=row)
        except ValueError as error:
            heard.append(str(error))

    run(Mesh(replica=2, shard=2), body)
    assert len(heard) == 4 and all("blocks.1.up.weight" in text for text in heard)


class Census(TorchDispatchMode):
    """Bytes of the storages that operators of this thread have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        alive = [storage for reference in self.seen.values() if (storage := reference()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return out


@pytest.mark.parametrize("row", SPLIT_ROWS)
def test_no_rank_ever_holds_the_model(row: str) -> None:
    """12 equal layers on 4 ranks: pieces of parameters and gradients, one unit and one module, never the whole."""
    layers, width, lock = 12, 64, threading.Lock()
    peaks = []

    def body(comm: Comm) -> None:
        with empty_parameters():
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        with Census() as census:
            Engine(model, comm, strategy=row, optimizer=sgd(model.parameters()))
        with lock:
            peaks.append(census.peak)

    run(Mesh(shard=4), body)
    layer = 4 * (width * width + width)
    pieces = 2 * layers * layer / 4
    assert max(peaks) <= pieces + 3 * layer + 4096, f"{max(peaks)} bytes, of {layers * layer} in the model"
