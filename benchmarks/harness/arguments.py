"""The options of every benchmark of a training step; a benchmark adds its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class StepArguments:
    """Compare plait with torch on this machine."""

    model: Literal["gpt256", "gpt512"] = "gpt256"
    rounds: int = 7
    """Turns that everything compared gets; a ratio is formed inside each."""
    ranks: int = 2
    only: tuple[str, ...] = ()
    """Names of the contestants of a step to run; empty: all."""
    json: Path | None = None
    """The file for every number, each round's included."""
    profile: str = ""
    """Name of one contestant: print torch.profiler's table of its steps on rank 0 instead."""
    profile_out: Path | None = None
    """The table's file; a Chrome trace next to it has the same name ending in .trace.json."""
    verbose: bool = False
    """Print the losses of every contestant."""
