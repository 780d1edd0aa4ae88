"""``plait.join`` without torchrun: a world of one rank, on the device that was asked for."""

import pytest
import torch

import plait
from plait.comm.init_process import VARIABLES


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_script_started_alone_is_a_world_of_one_rank(device: str) -> None:
    comm = plait.join(device=device, deadline=7.0)
    assert (comm.mesh.size, comm.rank, comm.device, comm.deadline) == (1, 0, torch.device(device), 7.0)


def test_a_rank_has_the_names_of_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    names = plait.run_threads("replica=2 shard=3", lambda comm: (comm.world_size, comm.local_rank, comm.rank))
    assert names == [(6, rank, rank) for rank in range(6)]
    monkeypatch.setenv("LOCAL_RANK", "1")  # as torchrun does, on another host
    assert plait.join(mesh="shard=1").local_rank == 1


def test_a_larger_mesh_alone_says_how_to_start_its_ranks() -> None:
    with pytest.raises(ValueError, match="start this program with torchrun --nproc-per-node 6"):
        plait.join("replica=2 shard=3")
