"""Experts that are full: the same tokens are dropped wherever they are; commands that name experts, and an example."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import plait
from plait.run.commands.main import main
from plait.tensor.expert_axis import ExpertAxis, within_capacity
from plait.tensor.time_axis import part_of_time


@pytest.mark.parametrize(("capacity", "room"), [(0.2, 3), (0.8, 12)], ids=["full early", "full late"])
@pytest.mark.parametrize("mesh", ["tensor=3", "shard=3 context=3", "shard=2 context=2 tensor=3"])
def test_the_first_tokens_of_a_sample_find_room_wherever_they_are(mesh: str, capacity: float, room: int) -> None:
    chosen = torch.rand(3, 36, 5, generator=torch.Generator().manual_seed(0)).topk(2).indices
    right, taken = within_capacity(chosen, 5, capacity), torch.zeros(3, 5, dtype=torch.int64)
    for step in range(36):  # room: ceil(capacity * 2 * 36 / 5) of each sample
        for sample, choice in product(range(3), range(2)):
            expert = int(chosen[sample, step, choice])
            assert int(right[sample, step, choice]) == (expert if taken[sample, expert] < room else -1)
            taken[sample, expert] += 1

    def body(comm: plait.Comm) -> None:
        def mine(whole: Tensor) -> Tensor:
            of_context = part_of_time(whole, comm.mesh.context, comm.mesh.index(comm.rank, ("context",)), 1)
            return of_context.tensor_split(comm.mesh.tensor, 1)[comm.mesh.index(comm.rank, ("tensor",))]

        axis = ExpertAxis(comm, sequence=comm.mesh.tensor > 1)
        assert torch.equal(within_capacity(mine(chosen), 5, capacity, axis), mine(right))

    plait.run_threads(mesh, body)


ON_FOUR = ["--mesh", "shard=4 expert=2", "--world", "thread", "--steps", "2", "--dtype", "fp64"]


def test_a_mixture_of_a_users_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--job", "examples/my_mixture.py:job", *ON_FOUR]) == 0
    assert "verdict: equal" in capsys.readouterr().out
