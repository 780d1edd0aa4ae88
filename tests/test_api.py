"""``plait.join`` without torchrun: a world of one rank, on the device that was asked for."""

import pytest
import torch

import plait
from plait.comm.environment import VARIABLES


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_script_started_alone_is_a_world_of_one_rank(device: str) -> None:
    comm = plait.join(device=device, deadline=7.0)
    assert (comm.mesh.size, comm.rank, comm.device, comm.deadline) == (1, 0, torch.device(device), 7.0)


def test_a_larger_mesh_alone_says_how_to_start_its_ranks() -> None:
    with pytest.raises(ValueError, match="start this program with torchrun --nproc-per-node 6"):
        plait.join("replica=2 shard=3")
