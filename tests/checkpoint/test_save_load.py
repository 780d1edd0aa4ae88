"""A run that is saved and loaded equals an uninterrupted run; any layout loads any other's checkpoint."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each_rank import each_rank
from engine_cases import Made, distinct
from run_cases import LAYOUTS, Training, differences
from small_runs import go, state
from torch import Tensor, nn
from torch.optim import Optimizer

import plait
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm, run
from plait.comm.thread import ThreadWorld
from plait.run.formats import differences as checkpoints
from plait.run.formats.dcp import write_checkpoint
from plait.step import Engine
from plait.table.mesh import Mesh


def mesh(where: str) -> Mesh:
    return Mesh.parse(LAYOUTS[where][0])


PAIRS = ("ddp", "zero3", "zero3 on 4", "psdp", "tensors", "tensor", "pipe", "zbv", "bf16")


@pytest.mark.parametrize("source", PAIRS)
@pytest.mark.parametrize("target", PAIRS[1:] + PAIRS[:1])
def test_any_layout_loads_it_to_the_bit(source: str, target: str, tmp_path: Path) -> None:
    def leave(comm: Comm) -> Any:
        training = Training.begin(comm, source)
        training.go(0, 2)
        training.save(tmp_path)
        return training.state(), training.go(2, 3)

    def enter(comm: Comm) -> Any:
        training = Training.begin(comm, target, change=1)
        training.load(tmp_path)
        return training.state(), training.go(2, 3)

    (saved, loss), *_ = run(mesh(source), leave, deadline=30)
    for found, again in run(mesh(target), enter, deadline=30):
        assert not differences(found, saved)
        assert again == pytest.approx(loss, rel=5e-2 if "bf16" in (source, target) else 1e-5)


def test_a_checkpoint_of_november_2026_is_read() -> None:
    """Its files were written by ``trained`` on two ranks, before the engine was redrawn (commit 2e5a284d)."""

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def trained(comm: Comm, *, load: bool) -> list[Tensor]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
        if load:
            plait.load(Path(__file__).parent / "november_2026", engine)
        else:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(comm.rank))
            engine.backward(model(x).square().sum(), count=4)
            optimizer.step()
        state = engine.optimizer_state_dict()["state"].values()
        with engine.gathered():
            return [p.detach().clone() for p in model.parameters()] + [value for one in state for value in one.values()]

    [made, *_] = plait.run_threads("shard=2", lambda comm: trained(comm, load=False))
    for layout in ("shard=1", "shard=2", "shard=3"):
        [loaded, *_] = plait.run_threads(layout, lambda comm: trained(comm, load=True))
        torch.testing.assert_close(loaded, made)


def odd_model() -> nn.Module:
    """A scalar, a vector shorter than the ranks, an empty parameter."""
    values = {"scale": torch.tensor(2.0), "short": torch.tensor([1.0, 3.0]), "empty": torch.empty(0, 3)}
    run = lambda m, x: x * m.scale * m.short + m.empty.sum()  # noqa: E731
    return Made(run, **{name: nn.Parameter(value) for name, value in values.items()})


SMALL: dict[str, tuple[Any, int, Any, dict[str, Any]]] = {
    "odd sizes": (odd_model, 2, partial(torch.optim.Adagrad, lr=0.1), {}),
    "rows and columns": (
        lambda: distinct(nn.Linear(5, 7)).float(), 5, partial(torch.optim.Adafactor, lr=torch.tensor(0.1)),
        {"cut": "tensor"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("meshes", [("shard=1", "shard=3"), ("shard=3", "shard=2"), ("shard=2", "shard=1")])
def test_small_parameters_and_whole_tensor_states(meshes: tuple[str, str], kind: str, tmp_path: Path) -> None:
    """Adafactor keeps rows and columns, which no rank can cut; ``torch.optim.Adagrad`` has a state at once."""
    build, width, optimizer, settings = SMALL[kind]

    def begun(comm: Comm) -> Engine:
        model = build()
        return Engine(model, comm, strategy="zero3", optimizer=optimizer(model.parameters()), **settings)

    def leave(comm: Comm) -> Any:
        engine = begun(comm)
        for _ in range(2):
            engine.backward(engine.model(torch.ones(1, width)).square().sum(), 1)
            engine.optimizers[0].step()
        plait.save(tmp_path, engine)
        return state(engine)

    def enter(comm: Comm) -> Any:
        engine = begun(comm)
        assert plait.load(tmp_path, engine).extra is None
        return state(engine)

    saved, *_ = plait.run_threads(meshes[0], leave)
    assert not differences(plait.run_threads(meshes[1], enter), [saved] * Mesh.parse(meshes[1]).size)


@each_rank("shard=3")
def test_the_average_of_another_engine_is_refused(comm: Comm, tmp_path: Path) -> None:
    """A loop of two models has two averages, which have the same form."""
    one, other = (Training.begin(comm, "zero3") for _ in range(2))
    one.go(0, 1)
    with pytest.raises(ValueError, match="average of the weights of another engine"):
        plait.save(tmp_path, one.engine, ema=other.ema)
    one.save(tmp_path)
    with pytest.raises(ValueError, match="average of the weights of another engine"):
        plait.load(tmp_path, one.engine, ema=other.ema)


@each_rank("shard=3")
def test_a_parameter_that_no_optimizer_has_yet_is_no_obstacle(comm: Comm, tmp_path: Path) -> None:
    """It trains, and a group for it comes later, or never."""

    def begun() -> Engine:
        layer = nn.Linear(4, 4)
        nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
        optimizer = torch.optim.AdamW([layer.weight], lr=0.1)
        return Engine(nn.Sequential(layer), comm, strategy="zero1", optimizer=optimizer)

    engine, again = begun(), begun()
    go(engine)
    plait.save(tmp_path, engine)
    go(engine)
    plait.load(tmp_path, again)
    go(again)
    assert not differences(state(again), state(engine))


@each_rank("shard=3")
def test_a_load_that_one_rank_refuses_moves_nobody(comm: Comm, tmp_path: Path) -> None:
    """One rank has forgotten the average."""
    training = Training.begin(comm, "zero3")
    training.go(0, 2)
    training.save(tmp_path)
    training.go(2, 4)
    with pytest.raises((ValueError, RuntimeError)):
        plait.load(tmp_path, training.engine, ema=None if comm.rank == 1 else training.ema)
    assert training.engine.steps == 4


@pytest.mark.parametrize("value", ["nan", "1.5"])
@each_rank("shard=2")
def test_a_number_of_numpys_is_refused_when_it_is_saved(comm: Comm, value: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match="float64 cannot be saved"):
        plait.save(tmp_path, Training.begin(comm, "ddp").engine, extra={"best": np.float64(value)})


def test_a_saver_stays_with_its_folder_when_the_program_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = Engine(nn.Linear(3, 3), ThreadWorld(Mesh()).comm(0))
    saver = plait.Saver("run", engine)
    monkeypatch.chdir(tmp_path / "elsewhere")
    saver.save()
    assert saver.wait() == tmp_path / "run/step-000000" and not list(Path().iterdir())
    for path, words in (("a\0b", r"'a\\x00b' is no path: it has a null byte"), ("s3://a", "'s3://a' is a URL")):
        for call in (plait.save, plait.load):
            with pytest.raises(ValueError, match=words):
                call(path, engine)


OPTIMIZERS = torch.optim


class Own(torch.optim.AdamW):
    """Made from the saved one."""


def built(comm: Comm, kind: Any, *, frozen: str = "", split: bool = False) -> tuple[plait.Engine, Optimizer]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.copy_(torch.linspace(-1, number / 9, parameter.numel()).view(parameter.shape))
            parameter.requires_grad_(name != frozen)
    groups = [{"params": model.parameters()}, {"params": [], "lr": 0.1}, {"params": [], "lr": 0.2}]
    optimizer = plait.elementwise(kind(groups[: 3 if split else 1], lr=0.01))
    return plait.Engine(model, comm, strategy="zero3", optimizer=optimizer), optimizer


def saved(comm: Comm, path: Path, **settings: Any) -> None:
    engine, optimizer = built(comm, torch.optim.AdamW, **settings)
    engine.backward(engine.model(torch.ones(2, 5)).square().sum(), 2)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] /= 2
    plait.save(path, engine)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (OPTIMIZERS.RAdam, {}, "of '0.weight' is that of AdamW, and its optimizer here is RAdam: build it with AdamW"),
        (OPTIMIZERS.NAdam, {}, "has no momentum_decay, which NAdam needs"),
        (OPTIMIZERS.Adamax, {}, "that of AdamW, and its optimizer here is Adamax"),
        (OPTIMIZERS.AdamW, {"frozen": "1.weight"}, "values of 1 parameters that were frozen .*: 1.weight"),
    ],
)
def test_what_means_something_else_or_has_no_place_is_refused(
    kind: Any, settings: Any, words: str, tmp_path: Path
) -> None:
    def other(comm: Comm) -> None:
        engine, _ = built(comm, kind, **settings)
        before = engine.full_state_dict()
        with pytest.raises(ValueError, match=words):
            plait.load(tmp_path, engine)
        after = engine.full_state_dict()
        assert engine.steps == 0 and all(torch.equal(after[name], before[name]) for name in before)

    plait.run_threads("shard=2", lambda comm: saved(comm, tmp_path))
    plait.run_threads("shard=2", other)


@pytest.mark.parametrize("kind", [OPTIMIZERS.AdamW, OPTIMIZERS.Adam, Own])
def test_a_class_and_what_is_made_from_it_take_the_same(kind: Any, tmp_path: Path) -> None:
    def other(comm: Comm) -> Any:
        engine, _ = built(comm, kind)
        plait.load(tmp_path, engine)
        return engine.optimizer_state_dict()["state"]

    plait.run_threads("shard=2", lambda comm: saved(comm, tmp_path))
    state = plait.run_threads("shard=3", other)[0]
    assert len(state) == 4 and all(values["step"] == 1 for values in state.values())


def test_groups_without_parameters_go_on_too(tmp_path: Path) -> None:
    def other(comm: Comm) -> list[float]:
        engine, optimizer = built(comm, torch.optim.AdamW, split=True)
        plait.load(tmp_path, engine)
        return [group["lr"] for group in optimizer.param_groups]

    plait.run_threads("shard=2", lambda comm: saved(comm, tmp_path, split=True))
    assert plait.run_threads("shard=3", other) == [[0.005, 0.05, 0.1]] * 3


@each_rank("shard=2")
def test_a_run_without_an_optimizer_is_saved_and_loaded(comm: Comm, tmp_path: Path) -> None:
    ones, zeros = nn.Linear(3, 3), nn.Linear(3, 3)
    nn.init.ones_(ones.weight), nn.init.ones_(ones.bias), nn.init.zeros_(zeros.weight), nn.init.zeros_(zeros.bias)
    plait.save(tmp_path, plait.Engine(ones, comm, strategy="zero3"))
    engine = plait.Engine(zeros, comm, strategy="ddp")
    plait.load(tmp_path, engine)
    assert all(value.eq(1).all() for value in engine.full_state_dict().values())


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(15, dtype=torch.float64).reshape(5, 3)
        self.weight = nn.Parameter(torch.complex(values, -values / 7).to(dtype))
        self.register_buffer("turn", torch.tensor(1 + 2j, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight * self.turn).abs()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_saved_cut_anew_compared_and_loaded_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    def engine_of(comm: Comm) -> plait.Engine:
        model = Complex(dtype)
        return plait.Engine(model, comm, strategy="zero3", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))

    def straight(comm: Comm) -> Any:
        engine = engine_of(comm)
        engine.backward(engine.model(torch.ones(2, 5)).square().sum(), 2)
        engine.optimizer.step()
        plait.save(tmp_path, engine, extra=torch.tensor([1j, 2], dtype=dtype).conj()[0])
        return engine.full_state_dict(), engine.optimizer_state_dict()

    def resumed(comm: Comm) -> Any:
        engine = engine_of(comm)
        extra = plait.load(tmp_path / "again", engine).extra
        assert extra == -1j and extra.dtype == dtype
        return engine.full_state_dict(), engine.optimizer_state_dict()

    first, saved = plait.run_threads("shard=3", straight)[0], Checkpoint.find(tmp_path)
    own = {name: tensor.read() for name, tensor in saved.tensors.items()}
    again = Checkpoint.find(write_checkpoint(tmp_path / "again", 1, saved.manifest.values, own))
    assert not list(checkpoints.differences(saved, again))
    assert not differences(plait.run_threads("shard=2", resumed)[:1], [first])
    plait.run_threads("shard=2", lambda comm: plait.save(tmp_path / "other", engine_of(comm)))
    assert {name for name, _ in checkpoints.differences(again, Checkpoint.find(tmp_path / "other"))} >= {"model/weight"}
