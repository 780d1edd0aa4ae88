"""Shared memory between ranks: its parts, and worlds whose ranks are threads (processes: test_process_world.py)."""

import os
import resource
import threading
import time
from typing import Any

import comm_checks
import pytest
import torch
import torch.distributed as dist
from shared_worlds import play

from plait.comm import ProcessComm
from plait.comm.checks import pair_of
from plait.comm.operation import NO_NOTE, Operation
from plait.comm.process_identity import Peer, on_hosts
from plait.shared_memory import mailbox
from plait.shared_memory.arena import rounded
from plait.shared_memory.segment import Segment
from plait.shared_memory.semaphore import SIZE, Semaphore
from plait.table.mesh import Mesh

AXES = ("pipe", "replica", "shard", "tensor")


def test_a_semaphore_counts_wakes_and_gives_up() -> None:
    segment = Segment.make(SIZE)
    one, other = Semaphore(segment.address), Semaphore(segment.address)
    one.begin(1)
    assert one.value == 1 and one.take() and not one.take()
    assert not one.wait(0.05)
    thread = threading.Timer(0.05, other.post)
    thread.start()
    assert one.wait(30) and one.value == 0
    thread.join()
    segment.close()


def test_memory_that_cannot_be_had_is_refused_with_its_size() -> None:
    with pytest.raises(
        MemoryError, match=r"1048576\.0 MiB of shared memory cannot be had, .* MiB are available: .*--world process"
    ):
        Segment.make(2**40)
    _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, most))
    try:
        with pytest.raises(MemoryError, match=r"1\.0 MiB .*`ulimit -f` limits it too"):
            Segment.make(2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 640, 641, 1000, 1025, 2**20, 2**20 + 1, 3 * 2**20 + 5])
def test_blocks_are_rounded_up_to_four_sizes_in_a_power_of_two(nbytes: int) -> None:
    size = rounded(nbytes)
    assert nbytes <= size <= max(64 + nbytes, nbytes * 5 / 4) and size % 64 == 0 and rounded(size) == size


@pytest.mark.parametrize("mesh", ["shard=3", "shard=2 replica=2"])
@pytest.mark.parametrize("check", comm_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_does_what_every_world_does(mesh: str, check: Any) -> None:
    assert play(mesh, check) == [None] * Mesh.parse(mesh).size


def test_a_rank_that_leaves_is_named_at_once() -> None:
    def body(comm: ProcessComm) -> None:
        comm.barrier(AXES)
        if comm.rank != 1:
            comm.all_reduce(torch.ones(3), AXES).wait()

    zero, one, two = play("shard=3", body, deadline=60.0)
    assert one is None
    for error in (zero, two):
        assert isinstance(error, ConnectionError) and "rank 1 has left" in str(error), error


def test_a_reader_that_is_slow_to_open_has_what_its_owner_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner leaves and makes other files, with the same descriptors."""
    opened = Segment.open

    def slowly(*given: Any) -> Segment:
        time.sleep(0.3)
        return opened(*given)

    monkeypatch.setattr(Segment, "open", slowly)
    others = []

    def body(comm: ProcessComm) -> object:
        if comm.rank == 0:
            comm.send(torch.ones(5), 1).wait()
            comm.close()
            others.extend(Segment.make(2**20) for _ in range(5))
            for other in others:
                other.view(0, 2**18, torch.float32).fill_(7.0)
            return None
        comm.recv(y := torch.empty(5), 0).wait()
        return y.tolist()

    assert play("pipe=2", body) == [None, [1.0] * 5]
    for other in others:
        other.close()


def test_a_descriptor_that_is_another_file_by_now_is_not_opened() -> None:
    segment = Segment.make(4096, "plait-one")
    with pytest.raises(OSError, match="another file"):
        Segment.open(os.getpid(), segment.descriptor, "plait-two")
    Segment.open(os.getpid(), segment.descriptor, "plait-one").view(0, 1, torch.uint8).fill_(3)
    assert segment.view(0, 1, torch.uint8).item() == 3
    segment.close()


def test_it_may_be_used_first_in_inference_mode_and_with_parameters() -> None:
    def body(comm: ProcessComm) -> object:
        with torch.inference_mode():
            comm.all_reduce(x := torch.ones(70), ("pipe",)).wait()
        comm.all_reduce(y := torch.ones(70), ("pipe",)).wait()
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        if comm.rank:
            comm.recv(weight, 0).wait()
        else:
            comm.send(torch.ones(3, 4), 1)
        comm.broadcast(weight, ("pipe",), 1).wait()
        return [x.sum().item(), y.sum().item(), weight.sum().item()]

    assert play("pipe=2", body) == [[140.0, 140.0, 12.0]] * 2


def test_groups_may_be_waited_for_in_different_orders() -> None:
    """Ranks 0 and 3 wait for one axis first, ranks 1 and 2 for the other; each moves more than a window."""

    def body(comm: ProcessComm) -> list[float]:
        axes, tensors = ["shard", "replica"], [torch.ones(2**21) * 2**comm.rank for _ in range(2)]
        works = [comm.all_reduce(tensor, (axis,)) for tensor, axis in zip(tensors, axes, strict=True)]
        for work in works if comm.rank in (0, 3) else reversed(works):
            work.wait()
        return [tensor.unique().item() for tensor in tensors]

    assert play("shard=2 replica=2", body) == [[3.0, 5.0], [3.0, 10.0], [12.0, 5.0], [12.0, 10.0]]


def test_who_has_sent_all_leaves_while_others_compute() -> None:
    left = threading.Barrier(3)  # rank 0 goes on when the others have left

    def body(comm: ProcessComm) -> None:
        comm.all_reduce(torch.ones(10), ("shard",)).wait()
        if comm.rank:
            comm.close()
        left.wait(30)

    assert play("shard=3", body, deadline=90.0) == [None] * 3


def test_memory_that_cannot_be_had_breaks_the_world_and_the_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Segment.make

    def full(size: int, name: str) -> Segment:
        if size >= 2**20 and threading.current_thread().name.endswith("_1"):
            raise MemoryError("1.0 MiB of shared memory cannot be had")
        return make(size, name)

    monkeypatch.setattr(Segment, "make", full)

    def body(comm: ProcessComm) -> None:
        try:
            comm.all_reduce(torch.ones(10), ("shard",)).wait()
        finally:
            comm.close()

    errors = play("shard=3", body)
    assert sorted(type(error).__name__ for error in errors) == ["ConnectionError", "ConnectionError", "MemoryError"]


def test_more_messages_than_a_mailbox_holds() -> None:
    """Both sides send them all before they take any: each takes in what comes while it waits for room."""

    def body(comm: ProcessComm) -> bool:
        count, other = mailbox.RECORDS + 200, 1 - comm.rank
        for i in range(count):
            comm.send(torch.tensor([i]), other)
        got = torch.empty(1, dtype=torch.int64)
        for i in range(count):
            comm.recv(got, other).wait()
            assert got.item() == i
        return True

    assert play("pipe=2", body) == [True, True]


def test_another_number_of_bytes_is_not_taken_for_ones_own() -> None:
    def body(comm: ProcessComm) -> None:
        kind, x = ("send", torch.ones(4)) if comm.rank == 0 else ("recv", torch.ones(3))
        operation = Operation(kind, pair_of(comm.mesh, comm.rank, kind, 1 - comm.rank), NO_NOTE, len(x), x.dtype)
        move = comm.transport.send if comm.rank == 0 else comm.transport.recv
        comm.transport.wait(operation, move(operation, x, 1 - comm.rank, 7))

    sent, error = play("pipe=2", body)
    assert sent is None and "rank 0 sent 16 bytes where 12 were meant" in str(error)


def test_two_hosts_need_sockets_too() -> None:
    for error in play("shard=3", lambda comm: None, hosts="aab"):
        assert isinstance(error, ValueError)
        assert "messages over sockets need torch's default process group" in str(error)


def test_which_hosts_a_mesh_is_on() -> None:
    def on(mesh: str, hosts: str) -> str:
        peers = [Peer(rank, host, 1) for rank, host in enumerate(hosts)]
        return str(on_hosts(Mesh.parse(mesh), peers))

    assert on("replica=2 shard=2", "aabb") == "replica=2 shard=2 hosts=2"
    assert on("shard=3", "abc") == "shard=3 hosts=3"
    for hosts in ("aaaa", "aaab", "abab", "abba"):  # one, or unequal, or not one after the other
        assert on("replica=2 shard=2", hosts) == "replica=2 shard=2"
    for hosts in ("aaaa", "aabb", "abab"):  # given: one host plays two
        assert on("replica=2 shard=2 hosts=2", hosts) == "replica=2 shard=2 hosts=2"
    with pytest.raises(ValueError, match="the mesh says hosts=2, and its ranks are on 4 hosts: leave hosts out"):
        on("replica=2 shard=2 hosts=2", "abcd")


def test_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="moves tensors of CPUs, and this world is on meta: leave it out"):
        ProcessComm(Mesh(shard=1), 0, dist.HashStore(), device="meta", shared_memory=True)


def test_what_is_no_mailbox_is_refused() -> None:
    store = dist.HashStore()
    peers = [Peer(rank, "a", os.getpid()) for rank in range(2)]
    for said, error in (
        ("[1, 2, 3]", ConnectionError),
        ("x" * 1000, ConnectionError),
        ("[0, 7]", ConnectionError),
        ('[0, 7, "x"]', ConnectionError),
        ('{"descriptor": 7, "name": "x"}', ValueError),
    ):
        store.set("shared_memory/1", said)
        with pytest.raises(error, match=r"not written by plait|cannot reach the memory of rank 1"):
            ProcessComm(Mesh(shard=2), 0, store, peers, shared_memory=True)
    store.delete_key("shared_memory/1")
    with pytest.raises(TimeoutError, match=r"waited for rank 1 .*, which published no mailboxes"):
        ProcessComm(Mesh(shard=2), 0, store, peers, deadline=0.1, shared_memory=True)
