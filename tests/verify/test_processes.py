"""Cells of the matrix on processes, where a message arrives late if no rank waits for it."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from ports import free_port, spawn


def test_processes_are_one_process_too(tmp_path: Path) -> None:
    ranks = importlib.import_module("process_ranks")
    spawn(ranks.rank_main, ranks.RANKS, free_port(), str(tmp_path / "found.pt"))
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(found) > 10
    assert not any(found.values()), "\n".join(f"{shown}\n{told}" for shown, told in found.items() if told)
