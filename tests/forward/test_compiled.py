"""Units that are compiled: which ones, with which settings, and what draws in a graph is refused."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from plait.forward import compiled
from plait.forward.compiled import NotCompiledError, check_compile, closed_units, refuse_random
from plait.table.parallelism import Parallelism

CPU = torch.device("cpu")
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    ("operator", "settings", "draws"),
    [
        (torch.ops.aten.bernoulli.p, {"p": 0.5}, True),
        (ATTENTION, {"dropout_p": 0.1}, True),
        (ATTENTION, {"dropout_p": 0.0}, False),
        (torch.ops.aten.mul.Tensor, {}, False),
    ],
)
def test_an_operator_that_draws_is_refused(operator: Any, settings: dict[str, Any], draws: bool) -> None:
    graph = fx.Graph(nn.Module())
    graph.output(graph.call_function(operator, (graph.placeholder("x"),), settings))
    if not draws:
        return refuse_random(graph)
    with pytest.raises(NotCompiledError, match="it draws random numbers"):
        refuse_random(graph)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_units_with_no_unit_inside_are_compiled() -> None:
    model = nn.Sequential(Block(nn.Linear(2, 2)), nn.Linear(2, 2), Block(Block(nn.Linear(2, 2))))
    assert closed_units(model, ["", "0", "1", "2", "2.inner"]) == ["0", "2.inner"]
    assert closed_units(model, ["", "0", "2"], links=["2.inner"]) == ["0"]
    assert closed_units(model, [""]) == [""]
    assert closed_units(Block(nn.SyncBatchNorm(3)), [""]) == []


@pytest.mark.parametrize(
    ("settings", "tensor", "says"),
    [
        ({}, 2, "compile with a mesh of tensor=2: the messages inside of cut modules"),
        ({"recompute": "selective"}, 1, "compile with recompute 'selective'"),
    ],
)
def test_settings_that_do_not_go_with_it(settings: dict[str, Any], tensor: int, says: str) -> None:
    check_compile(Parallelism(**settings), tensor, CPU)
    with pytest.raises(ValueError, match=says):
        check_compile(Parallelism(compile=True, **settings), tensor, CPU)


def test_no_compiler_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_compiler", lambda device: f"a compiler for {device}")
    with pytest.raises(ValueError, match="compile needs a compiler for cpu; or leave compile out"):
        check_compile(Parallelism(compile=True), 1, CPU)
    check_compile(Parallelism(), 1, CPU)
