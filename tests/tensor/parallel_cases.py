"""Shared by the tests of split products: whole tensors with distinct values, a rank's part, and a measure."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.tensor import TensorAxis


class OfTransformers:
    """The face of a Hugging Face model for plait, before a class that has the modules: plan, both ends, a config."""

    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.tp_plan, self.config = tp_plan, SimpleNamespace(get_text_config=lambda: self.text)
        self.text = SimpleNamespace()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct values, the same in each call."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def part_of(whole: Tensor, dim: int, axis: TensorAxis, index: int | None = None) -> Tensor:
    """A rank's part of a tensor, a copy; this rank's, if none is named."""
    start, stop = axis.part(whole.size(dim), index)
    return whole.narrow(dim, start, stop - start).clone()


def on_ranks(ways: int, body: Callable[[TensorAxis], Any], *, sequence: bool = False, length: int = 0) -> list[Any]:
    """``body(axis)`` on every rank of a tensor axis."""

    def start(comm: Comm) -> Any:
        axis = TensorAxis(comm, sequence=sequence)
        axis.length = length
        return body(axis)

    return plait.run_threads(f"tensor={ways}", start, deadline=20)


def is_close(ours: Tensor | None, theirs: Tensor | None, what: str = "") -> None:
    """Shape, dtype, and max|a - b| <= tolerance * max(1, max|b|)."""
    assert ours is not None and theirs is not None, what
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    if theirs.numel():
        gap = (ours - theirs).abs().max().item()
        assert gap <= TOLERANCE[theirs.dtype] * max(1.0, theirs.abs().max().item()), f"{what}: {gap}"


def lines(axis: TensorAxis) -> list[tuple[str, str, str]]:
    return [(e.kind, e.note.phase, e.note.unit) for e in axis.comm.ledger.entries]


def together(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(pieces), dim)
