"""Ranks that would train different models all get an error before the first step, field by field."""

import importlib.util
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank, each_world
from engine_cases import batches, count, loss_sum
from pipeline_cases import engine_on
from programs import ALONE, World, assert_same, layout, step
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.zero.state.identity import code_of


class Acting(nn.Module):
    """A model with all that two ranks may have different."""

    def __init__(self, act: Any = F.gelu, **more: Any) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 4), nn.Dropout(0.1), nn.Linear(4, 3)
        self.act = act
        self.settings = {"depth": 2, "names": ["a", "b"], **more}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.act(self.first(x))))


class Other(Acting):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.act(self.first(x)) * 2))


def renamed() -> nn.Module:
    model = Acting()
    model.extra = nn.Linear(2, 2)
    return model


def dropping(p: float) -> nn.Module:
    model = Acting()
    model.drop.p = p
    return model


def frozen() -> nn.Module:
    model = Acting()
    model.first.bias.requires_grad_(False)
    return model


def decayed(parameters: Any, swap: bool = False) -> torch.optim.Optimizer:
    given = list(parameters)
    matrices, others = ([p for p in given if (p.dim() > 1) is matrix] for matrix in (not swap, swap))
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices}], lr=0.1)


swapped = partial(decayed, swap=True)
by_default = partial(torch.optim.AdamW, lr=0.1)


BUILDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "activation": (Acting, lambda: Acting(F.silu), r"act is .*gelu on .*silu"),
    "lambda": (  # on two lines, because code is identified by its line
        lambda: Acting(lambda x: x * 2),
        lambda: Acting(lambda x: x * 3),
        r"act is ",
    ),
    "attribute": (Acting, lambda: Acting(depth=3), r"settings is \{depth: 2"),
    "dropout": (lambda: dropping(0.1), lambda: dropping(0.2), r"drop\.p is 0\.1 on .*0\.2 on rank 1"),
    "class": (Acting, Other, r"the model is [a-z._]*test_agreement\.Acting on "),
    "module": (Acting, renamed, r"extra is not there on "),
    "tensor": (lambda: Acting(t=torch.ones(2)), lambda: Acting(t=torch.zeros(2)), r"s is .*t: torch\.float32 \(2,\) "),
    "frozen": (Acting, frozen, r"parameter 'first\.bias' is \(4,\) torch\.float64 on .*frozen on rank 1"),
}


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("where", ["ddp", "zero3", "hsdp"])
def test_different_models_are_refused_with_both_values(where: str, kind: str) -> None:
    mesh, row = layout(where)
    usual, unusual, text = BUILDS[kind]
    values = usual().double().state_dict()

    def body(comm: Comm) -> str:
        model = (unusual if comm.rank == 1 else usual)().double()
        model.load_state_dict(values, strict=False)
        with pytest.raises(ValueError, match=f"the ranks brought different models: .*{text}") as caught:
            Engine(model, comm, strategy=row)
        return str(caught.value)

    told = run(mesh, body, deadline=20)
    assert len(set(told)) == 1, "every rank says the same"
    assert "on rank 1" in told[0] and ("on rank 0" in told[0] or "on ranks 0, " in told[0])


@each_rank("shard=3", refused=r"1 of the buffers differ between ranks \(running_mean\)")
def test_buffers_that_differ_are_refused(comm: Comm) -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.add_(comm.rank == 2)
    model.register_buffer("_of_this_rank", torch.full((2,), comm.rank))
    Engine(model, comm, strategy="zero3")


def test_code_is_told_by_the_file_that_has_it(tmp_path: Path) -> None:
    kinds = []
    for number, text in enumerate(("x + 1", "x + 1", "x + 2")):
        file = tmp_path / f"{number}.py"
        file.write_text(f"class Shift:\n    def forward(self, x):\n        return {text}\n")
        spec = importlib.util.spec_from_file_location(f"user{number}", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kinds.append(module.Shift)
    one, same, other = map(code_of, kinds)
    assert one == same != other
    forward = code_of(kinds[0].forward)
    assert re.fullmatch(r"[0-9a-f]{8} line 2", forward) and forward == code_of(kinds[1]().forward)
    assert code_of(None) == code_of(len) == ""


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "class": (partial(torch.optim.Adam, lr=0.1), r"optimizer is torch\.optim\.adamw\.AdamW on "),
    "lr": (partial(torch.optim.AdamW, lr=0.2), r"optimizer group 0 lr is 0\.1 on .*, 0\.2 on rank 1"),
    "betas": (partial(by_default, betas=(0.5, 0.9)), r"group 0 betas is \[0\.9, 0\.999"),
    "decay": (partial(by_default, weight_decay=0.3), r"group 0 weight_decay is 0\.01"),
    "groups": (decayed, r"optimizer group 1 \w+ is not there on "),
    "none": (lambda parameters: None, r"optimizer is torch\.optim\.adamw\.AdamW on .*, not there on rank 1"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("where", ["zero1", "psdp", "pipe"])
def test_different_optimizers_are_refused_with_both_values(where: str, kind: str) -> None:
    mesh, row = layout(where)
    other, text = OPTIMIZERS[kind]

    def body(comm: Comm) -> str:
        model = cases.distinct(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
        with pytest.raises(ValueError, match=f"different settings: .*{text}") as caught:
            engine_on(model, comm, strategy=row, optimizer=other if comm.rank == 1 else by_default)
        return str(caught.value)

    assert len(set(run(mesh, body, deadline=20))) == 1, "every rank says the same"


def scaled(model: nn.Module, batch: cases.Batch, w: float = 1.0) -> Tensor:
    return loss_sum(model, batch) * w


LOSSES: dict[str, tuple[Callable[[int], Any], str]] = {
    "code": (lambda rank: scaled if rank else loss_sum, r"[0-9a-f]{8} line \d+ on rank 0"),
    "default": (
        lambda rank: lambda model, batch, w=1.0 + rank: scaled(model, batch, w),
        ".* w=1.0 on rank 0, .* w=2.0",
    ),
    "partial": (lambda rank: partial(scaled, w=1.0 + rank), ".* w=1.0 on rank 0, .* w=2.0 on rank 1"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_different_loss_functions_are_told(kind: str) -> None:
    loss, text = LOSSES[kind]
    with pytest.raises(ValueError, match=f"the code of loss_fn is {text}"):
        run(Mesh(shard=2), lambda comm: Engine(cases.net(), comm, loss_fn=loss(comm.rank), count_fn=count), deadline=20)


@each_rank("shard=2", refused=r"optimizer group 0 params is \['bias'\] on rank 0, \['weight'\] on rank 1")
def test_the_same_parameters_in_other_groups_are_told(comm: Comm) -> None:
    engine_on(cases.distinct(nn.Linear(5, 5)), comm, optimizer=swapped if comm.rank else decayed)


@each_rank("shard=2")
def test_what_belongs_to_a_rank_is_its_own(comm: Comm) -> None:
    model: Any = cases.distinct(nn.Linear(3, 3))
    model._own, model.local_rank, model.device, model.noise = comm.rank, comm.rank, torch.device("cpu"), object()
    model.train(comm.rank == 0)
    Engine(model, comm, strategy="ddp")


@pytest.mark.parametrize("where", ALONE[1:])
@each_world()
def test_another_learning_rate_is_noticed_at_the_next_step(world: World) -> None:
    engine = world.engine(cases.net())
    first, second = map(world.part, batches(2))
    step(engine, first)
    if world.rank == 1:
        engine.optimizer.param_groups[0]["lr"] *= 0.5  # its scheduler stepped, the others' did not
    before = engine.full_state_dict()
    with pytest.raises(ValueError, match=r"not at the same place of the run.*lr is 0\.01 on rank.* 0\.005 on rank 1"):
        step(engine, second)
    assert_same(engine.full_state_dict(), before)


@pytest.mark.parametrize("where", ["ddp", "zero1"])
@each_world(refused=r"gradients thrown away by zero_grad is 0 on rank.* 1 on rank 1")
def test_a_batch_thrown_away_by_one_rank_is_noticed_at_the_next_step(world: World) -> None:
    """The others made a step of it, so from then on this rank is one behind."""
    engine = world.engine(cases.net())
    for number, batch in enumerate(map(world.part, batches(3))):
        if (number, world.rank) == (1, 1):
            engine.backward(loss_sum(engine.model, batch), count(batch))
            engine.optimizer.zero_grad()
        else:
            step(engine, batch)
