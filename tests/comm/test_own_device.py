"""Which GPU is a rank's: the one of its number, the only one that it sees, the one that it names; or none."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.comm.environment import own_device


@pytest.mark.parametrize(
    ("given", "gpus", "variables", "found"),
    [
        ("cuda", 8, {"LOCAL_RANK": "3", "RANK": "11"}, "cuda:3"),
        ("cuda", 8, {"RANK": "3"}, "cuda:3"),
        ("cuda", 8, {}, "cuda:0"),
        ("cuda", 1, {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),  # a launcher shows each rank its own
        ("cuda", 2, {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "6,7"}, "cuda:0"),
        ("cuda:1", 2, {"LOCAL_RANK": "0"}, "cuda:1"),
        ("cpu", 0, {"LOCAL_RANK": "3"}, "cpu"),
    ],
)
def test_a_rank_has_one(
    monkeypatch: pytest.MonkeyPatch, given: str, gpus: int, variables: dict[str, str], found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_device(given, variables) == torch.device(found)


def test_a_rank_without_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"cuda:2 is wanted by the rank with number 2 \(LOCAL_RANK\)"):
        own_device("cuda", {"LOCAL_RANK": "2"})
    with pytest.raises(ValueError, match="device cuda:5: torch sees 2 CUDA devices here"):
        own_device("cuda:5", {"LOCAL_RANK": "0"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device here"):
        plait.join(device="cuda")
