"""The surroundings of a staged model: the user's hooks and modes, optimizers, units by name, initial values."""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import adamw, batches
from pipeline_cases import build, chain, engine_on, linear, on, refused, step
from torch import Tensor, nn

import plait.step.engine
from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh


def test_hooks_fire_once_for_each_microbatch_on_the_stage_that_has_them() -> None:
    template = chain(linear(), linear())

    def body(comm: Comm) -> Counter[str]:
        model, seen = copy.deepcopy(template), Counter[str]()
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: seen.update([name]))
        model.l0.register_forward_hook(lambda *_: seen.update(["forward"]))
        model.l1.register_full_backward_hook(lambda *_: seen.update(["backward"]))
        step(engine_on(model, comm), batches(1)[0])
        return seen

    first, last = on("pipe=2", body)
    assert first == {"l0.weight": 4, "l0.bias": 4, "forward": 4}
    assert last == {"l1.weight": 4, "l1.bias": 4, "backward": 4}


@pytest.mark.parametrize("what", ["a lock", "a tensor of a graph"])
def test_models_that_carry_things_which_cannot_be_copied(what: str) -> None:
    def body(comm: Comm) -> float:
        model = chain()
        model.kept = threading.Lock() if what == "a lock" else model(torch.ones(2, 5).double())
        return step(engine_on(model, comm), batches(1)[0]).loss

    assert on("pipe=2", body) == pytest.approx(on("pipe=1", body) * 2, abs=1e-12)


@each_rank("pipe=2")
def test_a_model_that_is_changed_after_it_was_wrapped_is_refused(comm: Comm) -> None:
    engine = build(chain(), comm)
    first = next(module for module in engine.model.modules() if isinstance(module, nn.Linear))
    first.weight = nn.Parameter(torch.ones(first.weight.shape))
    with pytest.raises(ValueError, match="changed after its Engine was built"):
        step(engine, batches(1)[0])


@pytest.mark.parametrize("kind", [list, iter], ids=["list", "generator"])
def test_units_by_name(kind: Any) -> None:
    names = ["l0", "l1.up", "l2"]
    template = chain(cases.Block(), cases.Block(), linear())

    def body(comm: Comm) -> tuple[list[str], float]:
        engine = build(template, comm, strategy="zero3", units=None if comm.mesh.pipe == 1 else kind(names))
        return [unit.name for unit in engine.placed.units if unit.name != "root"], step(engine, batches(1)[0], 2).loss

    wanted = on("shard=2", body)[0][1]
    found = on("pipe=2 shard=2", body)
    assert [units for units, _ in found] == [["l0", "l1.up"]] * 2 + [["l2"]] * 2
    assert [loss for _, loss in found] == pytest.approx([wanted] * 4, abs=1e-12)
    refused("no module 'l9'", template, units=["l9"])


@pytest.mark.parametrize("order", ["1f1b", "zbv", "interleaved"])
@pytest.mark.parametrize("kind", ["register_post_accumulate_grad_hook", "register_hook"])
def test_a_users_hook_on_a_tied_weight(kind: str, order: str) -> None:
    first, last = linear(), linear()
    last.weight = first.weight
    template = chain(first, linear(), linear(), last)
    data = batches(2)

    def body(comm: Comm) -> tuple[int, dict[str, Tensor]]:
        model, calls = copy.deepcopy(template), 0

        def hook(_: Tensor) -> None:
            nonlocal calls
            calls += 1

        getattr(model.get_parameter("l0.weight"), kind)(hook)
        engine = engine_on(model, comm, schedule=order)
        for batch in data:
            step(engine, batch, 3)
        return calls, engine.full_state_dict()

    truth = cases.plain(template, data)
    found = on("pipe=2", body)
    assert sum(calls for calls, _ in found) == 2 * 3 * 2
    for _, state in found:
        assert all(cases.close(state[name], truth.state[name]) for name in truth.state)


SOURCE = Path(plait.step.engine.__file__).parents[1]
BETWEEN = [f"{file}.py" for file in ("pipeline/runtime", "pipeline/stage", "zero/unshard", "forward/context")]
BETWEEN += ["forward/interceptor.py"]


def test_five_files_are_between_the_step_and_the_loss() -> None:
    template, seen = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1), nn.Linear(5, 5)), list[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            seen.append(file.relative_to(SOURCE).as_posix())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        sys.setprofile(None)
        return model(x).square().sum()

    def body(comm: Comm) -> None:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy="zero3", optimizer=adamw(model.parameters()), loss_fn=loss, count_fn=len)
        engine.step([torch.ones(2, 5)])  # the first step looks at more
        if comm.rank == 0:
            sys.setprofile(note)
        engine.step([torch.ones(2, 5)])

    run(Mesh(shard=2), body)
    assert [*dict.fromkeys(seen[seen.index(BETWEEN[0]) :])] == BETWEEN
