"""Engines' cases in worlds of processes."""

import json
from pathlib import Path
from typing import Any

import engine_ranks
from ports import free_port, spawn


def outcomes(cases: engine_ranks.Cases, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks in sorted({engine_ranks.config_of(case).machine.parsed_mesh.size for case in cases.values()}):
        path = folder / f"{ranks}.json"
        spawn(engine_ranks.rank_main, ranks, ranks, free_port(), str(path), cases)
        found |= json.loads(path.read_text())
    return found
