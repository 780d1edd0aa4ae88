"""Cells of the matrix with processes for ranks, where a message that nobody waits for has not come yet."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from ports import free_port


def test_processes_are_one_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = importlib.import_module("process_ranks")
    mp.spawn(ranks.rank_main, (free_port(), str(tmp_path / "found.pt")), nprocs=ranks.RANKS)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(found) > 10
    assert not any(found.values()), "\n".join(f"{shown}\n{told}" for shown, told in found.items() if told)
