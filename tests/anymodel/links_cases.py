"""Chains of unmodified models with split points: the wing runs them, not the library."""

from __future__ import annotations

import pipeline_cases
from engine_cases import Block, distinct
from pipeline_cases import linear
from torch import nn


class Chain(pipeline_cases.Chain):
    """The same model, which promises nothing of its blocks."""

    pipeline_blocks = None

    def pipeline_links(self) -> list[str]:
        return [f"l{number}" for number in range(self.num_links)]


def chain(*links: nn.Module) -> Chain:
    """The links, or four unlike ones; every weight its own number."""
    return distinct(Chain(*(links or (linear(), nn.Tanh(), Block(), linear()))))
