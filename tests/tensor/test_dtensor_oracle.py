"""torch's DTensor as oracle: four processes, every operator of the table that both know, values and gradients."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

Found = dict[str, dict[str, Any] | None]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What four processes over gloo found."""
    path = tmp_path_factory.mktemp("oracle") / "found.pt"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        ranks = importlib.import_module("dtensor_ranks")
        mp.spawn(ranks.rank_main, (port, str(path)), nprocs=ranks.RANKS)
    result: Found = torch.load(path, weights_only=True)
    return result


def test_values_and_gradients_are_those_of_dtensor(found: Found) -> None:
    both = {key: row for key, row in found.items() if row is not None}
    assert len(both) > 150, f"DTensor computed only {len(both)} of {len(found)} rows"
    wrong = [f"{key}: {row}" for key, row in both.items() if not max(row["values"], row["gradients"]) < 1e-9]
    assert not wrong, "\n".join(wrong)


def test_where_both_compute_without_a_message_they_agree_on_the_layout(found: Found) -> None:
    both = {key: row for key, row in found.items() if row is not None and row["layout"] is not None}
    assert len(both) > 50
    assert sum(row["layout"] for row in both.values()) > 0.8 * len(both), [
        k for k, r in both.items() if not r["layout"]
    ]
