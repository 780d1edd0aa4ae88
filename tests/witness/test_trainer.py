"""transformers' Trainer under torchrun's variables: right as it comes, and what makes it wrong has a name."""

from pathlib import Path

import pytest
from ports import free_port, spawn

pytest.importorskip("transformers", reason="Trainer is transformers'")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import trainer_ranks

import plait


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes witnessed a folder for each kind."""
    path = tmp_path_factory.mktemp("trainer")
    spawn(trainer_ranks.rank_main, trainer_ranks.RANKS, trainer_ranks.RANKS, free_port(), str(path))
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("as it comes", ""),
        ("a rank's own count", "each rank divides by its own count"),
        ("an own loss", ""),
        (
            "an own loss that ignores the count",
            "forward 0 of rank 0 counts 23/9 times, forward 1 of rank 0 counts 23/5 times",
        ),
        ("an own compute_loss", "the means of forwards of different counts are averaged"),
    ],
)
def test_what_a_trainer_trains(folder: Path, kind: str, says: str) -> None:
    job = trainer_ranks.outside if kind.startswith("an own loss") else trainer_ranks.job
    clip = trainer_ranks.KINDS[kind][1].get("max_grad_norm", trainer_ranks.CLIP) or None
    found = plait.judge(job, folder / kind / "witnessed", clip=clip)
    assert found.equal if not says else (found.phase == "gradient" and says in found.text), found.text
