"""torch's DTensor as oracle: four processes, every operator of the table that both know, values and gradients."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from ports import free_port

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What four processes over gloo found."""
    path = tmp_path_factory.mktemp("oracle") / "found.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ranks = importlib.import_module("dtensor_ranks")
        mp.spawn(ranks.rank_main, (free_port(), str(path)), nprocs=ranks.RANKS)
    result: Found = torch.load(path, weights_only=True)
    return result


def test_values_and_gradients_are_those_of_dtensor(found: Found) -> None:
    both = {key: row for key, row in found.items() if "error" not in row}
    assert len(both) > 0.95 * len(found) > 150, [f"{k}: {r['error']}" for k, r in found.items() if "error" in r]
    wrong = [f"{key}: {row}" for key, row in both.items() if not max(row["values"], row["gradients"]) < 1e-9]
    assert not wrong, "\n".join(wrong)


def test_where_neither_sends_anything_the_layouts_are_the_same(found: Found) -> None:
    both = {key: row["layout"] for key, row in found.items() if row.get("layout") is not None}
    assert len(both) > 80 and all(both.values()), [key for key, same in both.items() if not same]
