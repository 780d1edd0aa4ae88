"""Engines' cases in worlds of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_ranks
import pytest
import torch.multiprocessing as mp
from ports import free_port


def outcomes(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What became of each case, from worlds of two and three processes."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for ranks in (2, 3):
            path = folder / f"{ranks}.json"
            mp.spawn(engine_ranks.rank_main, (ranks, free_port(), str(path), cases), nprocs=ranks)
            found |= json.loads(path.read_text())
    return found
