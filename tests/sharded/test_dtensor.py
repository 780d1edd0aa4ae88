"""Conversions to and from torch's DTensor keep the piece and the layout."""

from __future__ import annotations

import dtensor_ranks
import pytest
import torch.multiprocessing as mp
from ports import free_port


def test_dtensor_has_the_same_values_in_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.spawn(dtensor_ranks.rank_main, (free_port(),), nprocs=dtensor_ranks.RANKS)
