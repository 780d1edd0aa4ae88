"""Which GPU is a rank's: the one of its number, the only one that it sees, the one that it names; or none."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.comm.environment import own_device


@pytest.mark.parametrize(
    ("given", "gpus", "local_rank", "found"),
    [
        ("cuda", 8, "3", "cuda:3"),
        ("cuda", 8, "", "cuda:0"),
        ("cuda", 1, "3", "cuda:0"),  # a launcher shows each rank its own
        ("cuda:1", 2, "0", "cuda:1"),
        ("cpu", 0, "3", "cpu"),
    ],
)
def test_a_rank_has_one(monkeypatch: pytest.MonkeyPatch, given: str, gpus: int, local_rank: str, found: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_device(given, {"LOCAL_RANK": local_rank}) == torch.device(found)


def test_a_rank_without_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="cuda:2 is wanted by the rank with number 2 on this host"):
        own_device("cuda", {"LOCAL_RANK": "2"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device here"):
        plait.join(device="cuda")
