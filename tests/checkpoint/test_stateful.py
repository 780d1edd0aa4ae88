"""``plait.Checkpointed`` under ``torch.distributed.checkpoint``: any layout reads any other's, and so does FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from run_cases import differences
from small_runs import processes
from torch import nn
from torch.distributed.checkpoint import CheckpointException

import plait
from plait.comm import Comm, ThreadWorld, run
from plait.step import Engine
from plait.table.mesh import Mesh

RANKS = Path(__file__).with_name("dcp_ranks.py")
CHAINS = {
    2: ("ddp", "zbv", "bf16", "offload", "ddp", "fsdp2"),
    3: ("tensors", "zero1", "zero3", "tensors", "fsdp2"),
    4: ("zero3 on 4", "psdp", "tensor", "pipe", "zero3 on 4", "fsdp2"),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", CHAINS)
def test_any_layout_reads_any_other_to_the_bit_and_fsdp2_reads_all(ranks: int, tmp_path: Path) -> None:
    processes(RANKS, ranks, tmp_path, *CHAINS[ranks])
    for rank in range(ranks):
        told = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert told["found"] == []
        assert told["losses"] == pytest.approx([told["losses"][0]] * len(told["losses"]), rel=1e-3)


def alone(change: float = 0.0, width: int = 7, seed: int = 0, kind: Any = torch.optim.AdamW, **settings: Any) -> Engine:
    """One rank."""
    model = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, number / 9, parameter.numel()).view(parameter.shape) + change)
    optimizer = None if kind is None else kind(model.parameters(), lr=0.01)
    return Engine(model, ThreadWorld(Mesh()).comm(0), optimizer=optimizer, seed=seed, **settings)


def go(engine: Engine) -> float:
    x = torch.arange(15.0).view(3, 5).sin()
    engine.backward(engine.model(x).square().sum(), 3)
    assert engine.optimizer is not None
    engine.optimizer.step()
    return engine.last.loss


def state(engine: Engine) -> Any:
    return engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("before", [0, 1])
def test_states_of_every_form_before_and_behind_the_first_step(
    kind: Any, steps: int, before: int, tmp_path: Path
) -> None:
    """A state that is not there yet when it was saved is not there when it is loaded, and the other way round."""
    engine, other = alone(kind=kind, strategy="ddp"), alone(1.0, kind=kind, strategy="ddp")
    for _ in range(steps):
        go(engine)
    for _ in range(before):
        go(other)
    saved = state(engine)
    dcp.save({"app": plait.Checkpointed(engine)}, checkpoint_id=tmp_path)
    assert not differences(state(engine), saved), "a save changes nothing"
    dcp.load({"app": plait.Checkpointed(other)}, checkpoint_id=tmp_path)
    assert not differences(state(other), saved)
    assert go(engine) == go(other) and not differences(state(other), state(engine))


def test_an_average_and_its_decay_go_on(tmp_path: Path) -> None:
    engine, other = alone(), alone(1.0)
    ema, average = plait.EMA(engine, 0.75), plait.EMA(other)
    go(engine)
    ema.update()
    dcp.save({"app": plait.Checkpointed(engine, ema=ema)}, checkpoint_id=tmp_path)
    dcp.load({"app": plait.Checkpointed(other, ema=average)}, checkpoint_id=tmp_path)
    assert average.decay == 0.75 and not differences(average.full_state_dict(), ema.full_state_dict())
    with pytest.raises(ValueError, match="an average was saved, and is not here"):
        dcp.load({"app": plait.Checkpointed(other)}, checkpoint_id=tmp_path)


def test_what_was_saved_of_another_run_is_refused(tmp_path: Path) -> None:
    engine = alone()
    go(engine)
    dcp.save({"app": plait.Checkpointed(engine)}, checkpoint_id=tmp_path)

    def says(error: type[BaseException], words: str, other: Engine, *, ema: bool = False) -> None:
        average = plait.EMA(other) if ema else None
        with pytest.raises(error, match=words):
            dcp.load({"app": plait.Checkpointed(other, ema=average)}, checkpoint_id=tmp_path)

    says(CheckpointException, "Size mismatch", alone(width=8))
    says(ValueError, "saved with seed 0, and the engine has seed 3", alone(seed=3))
    says(ValueError, "an optimizer was saved, and is not here", alone(kind=None))
    says(CheckpointException, "Missing key in checkpoint state_dict: app.ema", alone(), ema=True)
    says(CheckpointException, "Missing key in checkpoint state_dict: app.optimizer", alone(kind=torch.optim.SGD))
    says(ValueError, "that of AdamW, and its optimizer here is RAdam", alone(kind=torch.optim.RAdam))
    smaller = nn.Linear(5, 7)
    with torch.no_grad():
        smaller.weight.zero_(), smaller.bias.zero_()
    inner = nn.Sequential(smaller)  # its names are among those that were saved
    says(ValueError, "saved is of another model: 7 of its tensors", Engine(inner, ThreadWorld(Mesh()).comm(0)))


def test_threads_and_the_middle_of_a_step_are_refused() -> None:
    def body(comm: Comm) -> None:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        with pytest.raises(ValueError, match=r"these 2 are not \(threads, or .*\): use plait.save"):
            plait.Checkpointed(Engine(model, comm))

    run(Mesh(shard=2), body, deadline=20)
    engine = alone()
    engine.model(torch.ones(3, 5))
    with pytest.raises(ValueError, match="in the middle of a step"):
        plait.Checkpointed(engine).state_dict()
    pieces = plait.Checkpointed(alone()).state_dict()["model"]["0.weight"]
    with pytest.raises(TypeError, match="it is for DCP to save and to load"):
        pieces.sum()
