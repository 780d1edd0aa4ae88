"""``--check-collectives``: ranks compare an operation before it runs."""

import re
from typing import Any

import collective_faults as faults
import comm_checks
import pytest
import torch

from plait.comm import Comm, MismatchError, run
from plait.referee.sanitize.collectives import check_collectives
from plait.table.collectives import Note
from plait.table.mesh import Mesh

AXES = faults.AXES


@pytest.mark.parametrize("mesh", ["shard=2", "replica=2 shard=2"])
@pytest.mark.parametrize("check", comm_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_what_is_right_goes_on_as_without_it(mesh: str, check: Any) -> None:
    run(Mesh.parse(mesh), lambda comm: check(check_collectives(comm)), deadline=30)


@pytest.mark.parametrize("mesh", ["shard=2", "replica=3"])
@pytest.mark.parametrize("name", faults.FAULTS)
def test_every_rank_is_told_what_each_meant_and_where(mesh: str, name: str) -> None:
    fault, words = faults.FAULTS[name]
    texts = run(Mesh.parse(mesh), lambda comm: faults.told(comm, fault, 1), deadline=3600)
    assert len(set(texts)) == 1, texts
    assert re.search(words, texts[0], re.S), texts[0]
    assert re.search(r"^  rank 0: .* at comm/collective_faults.py:\d+$", texts[0], re.M), texts[0]
    assert re.search(r"^  rank 1: .* at comm/collective_faults.py:\d+$", texts[0], re.M), texts[0]


def test_the_lines_are_those_that_were_skipped_and_called() -> None:
    fault = faults.skip_of_equals
    text, _ = run(Mesh(shard=2), lambda comm: faults.told(comm, fault, 1), deadline=3600)
    for rank, mark in enumerate(("skipped", "odd")):
        said = f"rank {rank}: barrier over pipe, replica, shard, tensor (0 x uint8) at {faults.line_of(fault, mark)}"
        assert said in text


def test_nothing_is_written_before_all_mean_the_same() -> None:
    def body(comm: Comm) -> torch.Tensor:
        check_collectives(comm)
        tensor = torch.full((4,), 1.0 + comm.rank)
        with pytest.raises(MismatchError):
            comm.all_reduce(tensor, ("shard",), "max" if comm.rank else "sum").wait()
        with pytest.raises(MismatchError, match="mean different collectives"):  # the world has come to an end
            comm.barrier(("shard",))
        return tensor

    for rank, tensor in enumerate(run(Mesh(shard=2), body, deadline=30)):
        assert torch.equal(tensor, torch.full((4,), 1.0 + rank))


def test_ranks_in_groups_that_do_not_meet_are_told_by_those_who_find_it() -> None:
    """Rank 1 is in a sum over replica, in place of shard: rank 3 hears of it, and tells rank 0, which waits for 1."""

    def body(comm: Comm) -> str:
        check_collectives(comm)
        with pytest.raises(MismatchError) as caught:
            axes = ("shard",) if comm.rank != 1 else ("replica",)
            comm.all_reduce(torch.ones(2), axes, note=Note("backward", "blocks.1"))
            comm.barrier(AXES)
        return str(caught.value)

    texts = run(Mesh(replica=2, shard=2), body, deadline=3600)
    assert all("rank 1: sum all_reduce of unit 'blocks.1' over replica" in text for text in texts), texts


LONG = ("u" * 156, "x" * 5000, "\u5c42" * 400, "\x00\\" * 300, "\udc80" * 200)


@pytest.mark.parametrize("name", LONG, ids=lambda name: f"{len(name)}-{ord(name[0]):x}")
def test_long_names_that_differ_at_the_end_are_told_with_their_lines(name: str) -> None:
    def body(comm: Comm) -> str:
        check_collectives(comm)
        comm.all_reduce(torch.ones(2), AXES, note=Note(name, name)).wait()
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(torch.ones(2), AXES, note=Note("", f"{name}{comm.rank}")).wait()
        return str(caught.value)

    for text in run(Mesh(pipe=2), body, deadline=30):
        assert "mean different collectives (other unit" in text, text
        assert len(re.findall(r"^  rank [01]: .* at comm/test_check.py:\d+$", text, re.M)) == 2, text
