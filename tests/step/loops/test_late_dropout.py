"""A model that draws nothing runs without a function mode; dropout that begins later is seen, or refused."""

from __future__ import annotations

import threading
from typing import Any

import engine_cases as cases
import pytest
import torch.nn.functional as F
from engine_cases import batches
from programs import STAGES
from streams import one_process, trained
from torch import Tensor, nn

from plait.forward.interceptor import Interceptor
from plait.torch_private import len_torch_function_stack

RECOMPUTED: tuple[str, dict[str, Any]] = "ddp", {"recompute": "full"}


class Late(nn.Module):
    """Drops once ``drop`` is above 0: in a layer whose p changes, in a function, or in one that is called only then."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.layer, self.kind, self.drop = nn.Linear(5, 5), nn.Dropout(0.0), kind, 0.0
        self.seen: set[int] = set()
        """The numbers of function modes that were on in the step's forwards."""
        if kind == "hooked":
            self.layer.register_forward_hook(lambda layer, args, out: F.dropout(out, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len_torch_function_stack())
        x = self.layer(self.linear(x))
        if self.kind == "function" or (self.kind == "sudden" and self.drop):
            x = F.dropout(x, self.drop)
        return x


def late(kind: str) -> nn.Module:
    return cases.distinct(nn.Sequential(*(Late(kind) for _ in range(4))))


def drops_from_4(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Late):
            module.drop = 0.4 if step >= 4 else 0.0
            if module.kind == "layer":
                module.layer.p = module.drop


@pytest.mark.parametrize("kind", ["layer", "function"])
@pytest.mark.parametrize("where", [*STAGES, "recomputed"])
def test_dropout_that_begins_late_is_the_single_process(where: str, kind: str) -> None:
    template, data = late(kind), batches(6)
    wanted, state = one_process(template, data, drops_from_4)
    assert one_process(template, data)[0] != wanted, "it drops"
    row, settings = RECOMPUTED if where == "recomputed" else (where, {})
    for losses, found in trained(row, template, data, before=drops_from_4, **settings):
        assert losses == pytest.approx(wanted, rel=1e-11)
        assert all(cases.close(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("where", ["ddp", "pipe", "zero3", "recomputed"])
@pytest.mark.parametrize("kind", ["layer", "function", "hooked"])
def test_a_model_that_draws_nothing_runs_without_a_mode(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.forward.interceptor.EVERY", 5)
    steps: dict[int, list[tuple[set[int], bool]]] = {}
    enter, followed = Interceptor._enter_module, set[int]()

    def entered(self: Interceptor, name: str, **how: Any) -> None:
        followed.add(threading.get_ident())
        enter(self, name, **how)

    monkeypatch.setattr(Interceptor, "_enter_module", entered)

    def note(model: nn.Module, step: int) -> None:
        """Notes the modes of the step before, and whether it followed modules."""
        parts, thread = [module for module in model.modules() if isinstance(module, Late)], threading.get_ident()
        steps.setdefault(thread, []).append((set().union(*(part.seen for part in parts)), thread in followed))
        followed.discard(thread)
        for part in parts:
            part.seen.clear()

    row, settings = RECOMPUTED if where == "recomputed" else (where, {})
    trained(row, late(kind), batches(7), before=note, **settings)
    on = int(kind != "layer" or where == "zero3")  # where the mode looks at who reads parameters at rest
    assert len(steps) > 1
    for seen in steps.values():
        assert seen[1:] == [({mode}, mode > 0) for mode in (1, 1, 1, on, on, 1)]


def test_draws_that_begin_late_are_refused_when_plait_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.forward.interceptor.EVERY", 6)
    with pytest.raises(ValueError, match=r"module '0' draws random numbers now, and nothing did in the first 3 steps"):
        trained("ddp", late("sudden"), batches(8), before=drops_from_4)
