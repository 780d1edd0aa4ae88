"""An optimizer's state goes to an optimizer that means the same by it, and all of it has a place there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import differences as state_differences
from torch import Tensor, nn
from torch.optim import Optimizer

import plait
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm
from plait.run.formats.dcp import write_checkpoint
from plait.run.formats.differences import differences

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


def test_a_run_without_an_optimizer_is_saved_and_loaded(tmp_path: Path) -> None:
    def body(comm: Comm) -> bool:
        model = nn.Linear(3, 3)
        nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
        plait.save(tmp_path, plait.Engine(model, comm, strategy="zero3"))
        other = nn.Linear(3, 3)
        nn.init.zeros_(other.weight), nn.init.ones_(other.bias)
        engine = plait.Engine(other, comm, strategy="ddp")
        plait.load(tmp_path, engine)
        return bool(engine.full_state_dict()["weight"].eq(1).all())

    assert plait.run_threads("shard=2", body) == [True, True]


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
    assert not list(differences(saved, again))
    assert not state_differences(plait.run_threads("shard=2", resumed)[:1], [first])
    plait.run_threads("shard=2", lambda comm: plait.save(tmp_path / "other", engine_of(comm)))
    assert {name for name, _ in differences(again, Checkpoint.find(tmp_path / "other"))} >= {"model/weight"}
