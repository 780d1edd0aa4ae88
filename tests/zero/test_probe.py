"""Optimizers that are not torch's: refused where a piece of one would be another update."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import plait
from plait import run_threads as run
from plait.comm import Comm
from plait.referee.sanitize import probe
from plait.referee.sanitize.probe import probe_elementwise
from plait.table.flat import lay
from plait.table.mesh import Mesh
from plait.zero.elementwise import ELEMENTWISE
from plait.zero.place import RunPlace


def why(kind: Callable[..., Optimizer], shape: tuple[int, ...] = (8, 12), dtype: Any = torch.float32) -> str | None:
    """The reason against an optimizer of a parameter of which each of two ranks has a piece."""
    optimizer = kind([nn.Parameter(torch.ones(shape, dtype=dtype))])
    layout = lay([("w", shape)], dtype.itemsize, 2)
    runs = layout.runs(*layout.piece(2, 0)) + layout.runs(*layout.piece(2, 1))
    pieces = [(RunPlace(piece, None, 0), torch.ones(piece.numel, dtype=dtype)) for piece in runs]
    return probe_elementwise(optimizer, optimizer.param_groups[0], pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_the_table_of_torchs_classes_is_right(kind: Any, dtype: torch.dtype) -> None:
    names = inspect.signature(kind).parameters
    options: list[dict[str, Any]] = [{}, {"foreach": True}, {"weight_decay": 0.1}, {"maximize": True}]
    options += [{"fused": True}, {"amsgrad": True, "foreach": True}, {"momentum": 0.9, "centered": True}]
    options += [{"momentum": 0.9, "nesterov": True, "fused": True}, {"decoupled_weight_decay": True}]
    for given in options:
        if given.keys() <= names.keys():
            assert why(partial(kind, lr=0.01, **given), dtype=dtype) is None, given


class Starts(torch.optim.SGD):
    """A rule that begins at a size, or a number of dims, which ``rule`` is called with."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(self.rule(p.grad), alpha=0.01)

    def rule(self, g: Tensor) -> Tensor:
        return g.sign()


class Factored(Starts):
    """As timm's Adafactor: one number a row and a column where both are 16 or more."""

    def rule(self, g: Tensor) -> Tensor:
        if g.dim() < 2 or min(g.shape[-2:]) < 16:
            return g.sign()
        square = g.square() + 1e-9
        return g / (square.mean(-1, keepdim=True) * square.mean(-2, keepdim=True) / square.mean()).sqrt()


class Rounded(Starts):
    """As 8-bit moments: in 255 parts of the largest of 2,048 elements, where there are 4,096 or more."""

    def rule(self, g: Tensor) -> Tensor:
        if g.numel() < 4096:
            return g
        blocks = g.reshape(-1)[: g.numel() // 2048 * 2048].view(-1, 2048)
        largest = blocks.abs().amax(1, keepdim=True)
        rounded = ((blocks / largest * 127).round() / 127 * largest).view(-1)
        return torch.cat([rounded, g.reshape(-1)[len(rounded) :]]).view(g.shape)


class Centred(Starts):
    """As gradients of convolutions are centred: a mean over all dims but the first."""

    def rule(self, g: Tensor) -> Tensor:
        return g - g.mean(dim=(1, 2, 3), keepdim=True) if g.dim() == 4 else g


STARTS = [(Factored, (32, 48)), (Rounded, (72, 64)), (Centred, (8, 4, 3, 3))]


@pytest.mark.parametrize(("kind", "shape"), STARTS)
def test_a_rule_that_starts_at_a_size_is_seen_on_the_real_shape(kind: Any, shape: tuple[int, ...]) -> None:
    assert why(kind) is None
    assert f"shape {shape} and on this rank's piece of it differ" in (why(kind, shape) or "")
    assert why(Starts, shape) is None


def test_what_a_probe_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIMIT", 1024)
    assert probe.shrunk((3, 5000, 7), 1024) == (3, 40, 7)
    assert "shape (32, 24)" in (why(Factored, (64, 48)) or "")
    assert why(Starts, (64, 48)) is None


@pytest.mark.parametrize("kind", [Starts, Factored])
def test_over_a_tensor_axis_the_pieces_of_a_matrix_are_tried(kind: Any) -> None:
    def body(comm: Comm, declare: bool = True) -> None:
        model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 24, bias=False))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model.tensor_plan = lambda: {"0": "column", "1": "row"}
        optimizer = kind(model.parameters())
        plait.Engine(model, comm, strategy="ddp", optimizer=plait.elementwise(optimizer) if declare else optimizer)

    run(Mesh(tensor=2), lambda comm: body(comm, declare=False), deadline=20)  # has the whole matrices
    if kind is Factored:
        with pytest.raises(ValueError, match=r"shape \(32, 24\) and on this rank's piece of it differ"):
            run(Mesh(tensor=2), body, deadline=20)
    else:
        run(Mesh(tensor=2), body, deadline=20)
