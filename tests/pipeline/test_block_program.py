"""The program of a model that names its blocks: carries of any form, and what breaks the promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_rank import each_rank
from engine_cases import WIDTH, batches, distinct, loss_sum
from pipeline_cases import Chain, chain, engine_on, linear, refused, same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.comm import Comm


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
