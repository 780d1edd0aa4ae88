"""A stage of a model that names its blocks: its program, carries of any form, what breaks the promise; and the
surroundings: the user's hooks and modes, optimizers, units by name."""

import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import WIDTH, adamw, batches, distinct, loss_sum
from pipeline_cases import Chain, build, chain, engine_on, linear, on, refused, same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait.step.engine
from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh


class Pairs(nn.Module):
    """x -> (x, {"sum": ..., "count": int64}), or a pair to a pair, or the last one to a tensor."""

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.linear, self.ends = linear(), ends

    def forward(self, carry: Any) -> Any:
        fresh = carry, {"sum": carry, "count": torch.ones(len(carry), 1).long()}
        x, rest = carry if isinstance(carry, tuple) else fresh
        y = self.linear(x) * rest["count"]
        return y + rest["sum"] if self.ends else (y, {"sum": rest["sum"] + y, "count": rest["count"] + 1})


@pytest.mark.parametrize(
    ("mesh", "row", "order"), [("pipe=2", "ddp", "1f1b"), ("pipe=3", "zero3", "zb_h1"), ("pipe=2", "zero1", "zbv")]
)
def test_a_carry_is_any_tree_of_tensors(mesh: str, row: str, order: str) -> None:
    same(distinct(Chain(Pairs(), Pairs(), Pairs(), Pairs(ends=True))), mesh, row, schedule=order)


class Running(Chain):
    """Runs its blocks as it is given."""

    run: Callable[[Chain, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return type(self).run(self, x)


def running(how: Callable[[Chain, Tensor], Tensor]) -> nn.Module:
    kind = type("Running", (Running,), {"run": staticmethod(how)})
    return distinct(kind(*(linear() for _ in range(4))))


def in_turn(model: Chain, x: Tensor, *places: int) -> Tensor:
    for place in places:
        x = model.links[place](x)
    return x


def together(model: Chain, x: Tensor, *, reentrant: bool) -> Tensor:
    x = model.links[0](x)
    x = checkpoint(lambda y: in_turn(model, y, 1, 2), x, use_reentrant=reentrant)
    return in_turn(model, x, 3)


class Keeps(nn.Linear):
    """Leaves a number of its forward on itself."""

    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.detach().square().mean()
        return super().forward(x)


def all_in_turn(model: Chain, x: Any) -> list[Any]:
    return [x := link(x) for link in model.links]


BROKEN: dict[str, tuple[str, type[nn.Module], Callable[[Any], Tensor]]] = {
    "sum": ("the loss reads", nn.Linear, lambda run: run[-1] + run[0]),
    "where": ("the loss reads", nn.Linear, lambda run: torch.where(run[0] > 0, run[-1], 0)),
    "whole number": ("the loss reads", Pairs, lambda run: run[-1][0] * run[0][1]["count"]),
    "item": ("'item' reads", nn.Linear, lambda run: run[-1] * float(run[0].abs().max().item() > 1)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_another_stage_has_never_gets_into_the_loss(how: str) -> None:
    words, kind, made = BROKEN[how]
    links = [Pairs() if kind is Pairs else linear() for _ in range(3)]
    broken = type("Broken", (Running,), {"run": staticmethod(lambda m, x: made(all_in_turn(m, x)))})
    refused(f"{words} a value of another stage", distinct(broken(*links)), "pipe=3")


def of_class(model: nn.Module) -> list[Any]:
    found: list[nn.Module] = []
    model.apply(lambda m: found.append(m) if isinstance(m, Keeps) else None)
    return [m.aux for m in found]


SEARCHES: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "by attribute": ("'aux'", lambda model: [link.aux for link in model.links]),
    "by class": ("a module", lambda model: [m.aux for m in model.modules() if isinstance(m, Keeps)]),
    "by apply": ("a module", of_class),
    "parameters": ("a module", lambda model: [p.square().sum() for p in model.parameters()]),
}


@pytest.mark.parametrize("how", SEARCHES)
def test_a_loss_that_takes_more_of_blocks_than_the_carry_is_refused(how: str) -> None:
    words, search = SEARCHES[how]
    model = distinct(Chain(*(Keeps(WIDTH, WIDTH) for _ in range(2))))

    def loss(stage: Any, batch: Any) -> Tensor:
        return loss_sum(stage, batch) * (1 + sum(search(stage)))

    refused(f"{words} of a block that has run is a value of another stage", model, loss=loss)


def test_what_is_made_of_the_form_of_a_carry_alone_is_known() -> None:
    def form(m: Chain, x: Tensor) -> Tensor:
        made = all_in_turn(m, x)
        return made[-1] + torch.ones_like(made[0]) * made[0].new_ones(made[0].shape[1])

    same(running(form), "pipe=3")


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("block 'l2' ran where 'l1' was to come", lambda m, x: in_turn(m, x, 0, 2, 1, 3)),
        ("block 'l0' ran where 'l1' was to come", lambda m, x: in_turn(m, x, 0, 0, 1, 2, 3)),
        (
            "'l1', the last block of stage 0, runs inside an autograd.Function",
            lambda m, x: together(m, x, reentrant=True),
        ),
        ("a checkpoint around several blocks", lambda m, x: together(m, x, reentrant=False)),
        ("loss_fn did not call the model", lambda m, x: x @ x.T),
    ],
    ids=["another order", "twice", "reentrant", "of two stages", "none"],
)
def test_a_forward_that_breaks_the_promise_is_refused(words: str, how: Callable[[Chain, Tensor], Tensor]) -> None:
    refused(words, running(how), split=(2, 2))


class Says(nn.Linear):
    """Returns what is no tensor beside its output."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 3


def test_a_carry_that_is_no_tensor_is_refused() -> None:
    words = "stage 0 ends with 'l0', which returns a int: a carry is a tensor, or a tuple, list or dict of tensors"
    refused(words, distinct(Chain(Says(WIDTH, WIDTH), linear())))


@each_rank("pipe=2")
def test_blocks_can_be_called_by_hand_between_steps(comm: Comm) -> None:
    model = chain(linear(), linear())
    engine = engine_on(model, comm)
    step(engine, batches(1)[0])
    block = model.links[comm.rank]
    assert block(torch.ones(1, WIDTH, dtype=block.weight.dtype)).isfinite().all()


# ---- the surroundings ---------------------------------------------------------------------------------------------


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
