"""A rank's GPU: the one of its number, the only one that it sees, the one that it names; or none."""

from pathlib import Path

import pytest
import torch

import plait
from plait.comm.environment import own_device

FOUR = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


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
        ("auto", 0, {}, "cpu"),
        ("auto", 2, {}, "cuda:0"),
        ("auto", 4, {**FOUR, "LOCAL_RANK": "3"}, "cuda:3"),
        ("auto", 2, {**FOUR, "LOCAL_RANK": "1"}, "cpu"),
        ("auto", 1, {**FOUR, "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),
        ("auto", 1, {**FOUR, "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3", "TORCHELASTIC_RUN_ID": "x"}, "cpu"),
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


def test_gpus_that_are_idle_are_told_once_on_each_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in "0123":
        own_device("auto", {**FOUR, "LOCAL_RANK": rank})
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 GPUs of this host are idle: 4 ranks need one each. Start 2 ranks" in said
    own_device("cpu", {**FOUR, "LOCAL_RANK": "0"})
    assert not capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("plait.comm.environment.NVIDIA", str(tmp_path))
    assert plait.join().device.type == "cpu"
    assert "this host has NVIDIA GPUs, but torch" in capsys.readouterr().err
