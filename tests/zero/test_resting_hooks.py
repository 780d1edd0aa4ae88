"""After a step's first microbatch autograd adds to the sums by itself, with the bits of a plain loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from threading import get_ident

import pytest
import torch
from engine_cases import distinct
from pytest import MonkeyPatch
from torch import Tensor, nn

import plait
from plait.zero.gradients import GradientHook


class Net(nn.Module):
    """Blocks; the last one has a part that runs from the second microbatch on, and a parameter that a hook watches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.late, self.watched = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.watched(self.late(x) if number else x)
        return out.square().sum()


DATA = [torch.linspace(-1, number + 1.0, 12).view(3, 4).double() for number in range(4)]


def plain_sums(template: Net) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, seen = copy.deepcopy(template), list[Tensor]()
    model.watched.weight.register_hook(seen.append)
    for number, x in enumerate(DATA):
        model(x, number).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


def engine_of(model: nn.Module, comm: plait.Comm, sums: dict[str, Tensor] | None = None) -> plait.Engine:
    """An engine whose sums of the last step are kept in ``sums``."""

    def listen(event: str, engine: plait.Engine) -> None:
        if event == "reducing" and sums is not None:
            for gradient in engine.placed.stages[0].gradients.flats:
                sums.update((gradient.name(i), gradient.views[i].clone()) for i in gradient.touched)

    return plait.Engine(
        model, comm, strategy="ddp", bucket=0, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), listener=listen
    )


@pytest.mark.parametrize("mesh", ["shard=1", "replica=2"])
def test_autograd_adds_to_sums_that_have_begun(mesh: str, monkeypatch: MonkeyPatch) -> None:
    """Hooks are called for first gradients, for the unit that is looked at, and where the program has a hook too."""
    template, heard = distinct(Net()), defaultdict[int, list[str]](list)
    wanted, gradients = plain_sums(template)
    call = GradientHook.__call__

    def hear(self: GradientHook, parameter: Tensor) -> None:
        heard[get_ident()].append(str(self))
        call(self, parameter)

    def body(comm: plait.Comm) -> None:
        model, seen, sums = copy.deepcopy(template), list[Tensor](), dict[str, Tensor]()
        model.watched.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        engine = engine_of(model, comm, sums)
        for _ in range(2):
            counts = list[int]()
            seen.clear()
            for number, x in enumerate(DATA):
                heard[get_ident()].clear()
                engine.backward(model(x, number), len(x), reduction="sum")
                counts.append(len(heard[get_ident()]))
                assert all(p.grad is None or type(p.grad) is not Tensor for p in model.parameters())
            engine.optimizers[0].step()
            assert counts == [8, 5, 3, 3], "all; late, watched.weight and blocks.0; without late"
            assert all(map(torch.equal, seen, gradients)) and sums.keys() == wanted.keys()
            assert all(torch.equal(sums[name], wanted[name]) for name in wanted)

    monkeypatch.setattr(GradientHook, "__call__", hear)
    plait.run_threads(mesh, body, deadline=20)


def test_a_backward_that_fails_or_is_not_the_engines_leaves_nothing() -> None:
    template = distinct(Net())
    wanted, _ = plain_sums(template)

    def fail(gradient: Tensor) -> None:
        raise KeyError("in a backward")

    def body(comm: plait.Comm) -> None:
        model, sums = copy.deepcopy(template), dict[str, Tensor]()
        engine = engine_of(model, comm, sums)
        engine.backward(model(DATA[0], 0), 3, reduction="sum")
        handle = model.late.weight.register_hook(fail)
        with pytest.raises(KeyError):
            engine.backward(model(DATA[1], 1), 3, reduction="sum")
        handle.remove()
        for number, x in enumerate(DATA):
            engine.backward(model(x, number), 3, reduction="sum")
            if number in (0, 2):
                with pytest.raises(ValueError, match=r"came outside of its engine's backward"):
                    model.late(DATA[0]).sum().backward()
        engine.optimizers[0].step()
        assert sums.keys() == wanted.keys() and all(torch.equal(sums[name], wanted[name]) for name in wanted)

    plait.run_threads("shard=1", body, deadline=20, sanitize=False)
