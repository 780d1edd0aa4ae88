"""``--check-collectives``: what ranks mean by an operation is compared before it runs."""

from __future__ import annotations

import re
import time
from typing import Any

import collective_faults as faults
import comm_checks
import pytest
import torch

from plait.comm import Comm, MismatchError, run
from plait.referee.sanitize.collectives import ROW_BYTES, Description, check_collectives
from plait.table.collectives import Note
from plait.table.mesh import Mesh

AXES = faults.AXES


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("check", comm_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_what_is_right_goes_on_as_without_it(mesh: str, check: Any) -> None:
    run(Mesh.parse(mesh), lambda comm: check(check_collectives(comm)), deadline=30)


@pytest.mark.parametrize("mesh", ["shard=2", "replica=3"])
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
def test_every_rank_is_told_what_each_meant_and_where(mesh: str, fault: faults.Fault) -> None:
    texts = run(Mesh.parse(mesh), lambda comm: faults.told(comm, fault, 1), deadline=3600)
    assert len(set(texts)) == 1, texts
    assert re.search(faults.FAULTS[fault], texts[0], re.S), texts[0]
    assert re.search(r"^  rank 0: .* at comm/collective_faults.py:\d+$", texts[0], re.M), texts[0]
    assert re.search(r"^  rank 1: .* at comm/collective_faults.py:\d+$", texts[0], re.M), texts[0]


def test_the_lines_are_those_that_were_skipped_and_called() -> None:
    for fault in (faults.skip_of_equals,):
        text, _ = run(Mesh(shard=2), lambda comm, fault=fault: faults.told(comm, fault, 1), deadline=3600)
        assert (
            f"rank 0: barrier over pipe, replica, shard, tensor (0 x uint8) at {faults.line_of(fault, 'skipped')}"
            in text
        )
        assert (
            f"rank 1: barrier over pipe, replica, shard, tensor (0 x uint8) at {faults.line_of(fault, 'odd')}" in text
        )


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


def test_messages_that_are_taken_late_and_in_another_order_are_no_difference() -> None:
    def body(comm: Comm) -> list[float]:
        check_collectives(comm)
        other, got = 1 - comm.rank, [torch.zeros(2) for _ in range(3)]
        receives = [comm.recv(tensor, other, Note("", f"number {i}")) for i, tensor in enumerate(got)]
        for i in range(3):
            comm.send(torch.full((2,), float(i)), other, Note("", f"number {i}")).wait()
            comm.barrier(AXES)
        for receive in receives[::-1]:
            receive.wait()
            receive.wait()
        return [tensor[0].item() for tensor in got]

    assert run(Mesh(pipe=2), body, deadline=30) == [[0.0, 1.0, 2.0]] * 2


def test_the_ledger_is_that_without_it() -> None:
    def body(comm: Comm) -> Any:
        comm.all_reduce(torch.ones(4), ("shard",)).wait()
        before = comm.ledger.entries
        comm.ledger.clear()
        check_collectives(comm).all_reduce(torch.ones(4), ("shard",)).wait()
        return before == comm.ledger.entries

    assert all(run(Mesh(shard=2), body))


LONG = ("u" * 156, "x" * 5000, "\u5c42" * 400, "\x00\\" * 300, "\udc80" * 200)


@pytest.mark.parametrize("name", LONG, ids=lambda name: f"{len(name)}-{ord(name[0]):x}")
def test_names_may_be_long(name: str) -> None:
    """Of collectives and messages, on ranks of which the receiver waits first."""

    def body(comm: Comm) -> float:
        check_collectives(comm)
        tensor = torch.full((2,), 1.0 + comm.rank)
        comm.all_reduce(tensor, AXES, note=Note(name, name)).wait()
        if comm.rank == 0:
            time.sleep(0.2)
            comm.send(tensor, 1, Note("", name)).wait()
            comm.recv(tensor, 1, Note(name, name)).wait()
        if comm.rank == 1:
            comm.recv(tensor, 0, Note("", name)).wait()
            comm.send(tensor + 1, 0, Note(name, name)).wait()
        comm.barrier(AXES)
        return tensor.sum().item()

    assert run(Mesh(pipe=2), body, deadline=30) == [8.0, 6.0]


@pytest.mark.parametrize("name", LONG, ids=lambda name: f"{len(name)}-{ord(name[0]):x}")
@pytest.mark.parametrize("kind", ["collective", "message", "waits"])
def test_long_names_that_differ_at_the_end_are_told_with_their_lines(name: str, kind: str) -> None:
    def body(comm: Comm) -> str:
        check_collectives(comm)
        tensor, note = torch.ones(2), Note("", f"{name}{comm.rank}")
        with pytest.raises(MismatchError) as caught:
            if kind == "message" and comm.rank == 0:
                comm.send(tensor, 1, note)
            if kind == "collective":
                comm.all_reduce(tensor, AXES, note=note).wait()
            if kind == "waits" or comm.rank == 1:
                comm.recv(tensor, 1 - comm.rank, note).wait()
            comm.barrier(AXES)
        return str(caught.value)

    texts = run(Mesh(pipe=2), body, deadline=30)
    wanted = "wait for a message of each other" if kind == "waits" else f"mean different {kind}s (other unit"
    for text in texts:
        assert wanted in text, text
        assert len(re.findall(r"^  rank [01]: .* at comm/test_check.py:\d+$", text, re.M)) == 2, text


def test_a_row_has_one_size_and_all_fields() -> None:
    for text in (*LONG, ""):
        mine = Description(text, {"number": 3, "unit": "ü" * 20}, "waits")
        assert len(mine.as_row()) == ROW_BYTES
        assert Description.read(mine.as_row()).fields == mine.fields
