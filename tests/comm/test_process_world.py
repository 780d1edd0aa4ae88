"""Processes as ranks, on gloo. Each scene is played once, by real processes (``comm_ranks.py``)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from plait_lessons.script import init
from ports import free_port

from plait.comm import ProcessComm
from plait.table.mesh import Mesh

RANKS = Path(__file__).with_name("comm_ranks.py")


def play(
    scene: str,
    mesh: str,
    *,
    deadline: float = 30,
    ranks: int | None = None,
    port: int | None = None,
    shared: bool = False,
    hosts: str = "",
) -> list[tuple[int, str]]:
    """Exit status and output of each rank; ``ranks`` of them start (all, unless told), on ``hosts``, by letter."""
    size, port = Mesh.parse(mesh).size, port or free_port()
    count = size if ranks is None else ranks
    with ThreadPoolExecutor(count) as pool:
        one = partial(play_one, deadline=deadline, shared=shared, hosts=hosts)
        return list(pool.map(lambda rank: one(scene, mesh, rank, size, port), range(count)))


def play_one(
    scene: str,
    mesh: str,
    rank: int,
    size: int,
    port: int,
    deadline: float = 30,
    shared: bool = False,
    hosts: str = "",
) -> tuple[int, str]:
    env = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(RANKS), scene, mesh, str(deadline)]
    command += ["shared" if shared else "", *([hosts] if hosts else [])]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output = process.communicate(timeout=110)[0]
        finally:
            process.kill()
    return process.returncode, output


GLOO = [(mesh, False) for mesh in ("shard=2", "shard=3", "shard=2 replica=2")]


@pytest.mark.parametrize(("mesh", "shared"), [*GLOO, ("shard=3", True)])
def test_does_what_every_world_does(mesh: str, shared: bool) -> None:
    for status, output in play("everything", mesh, shared=shared):
        assert status == 0 and output == "done\n", output


@pytest.mark.parametrize(("mesh", "hosts"), [("shard=3", "aab"), ("shard=2 replica=2", "abba")])
def test_so_does_one_of_several_hosts(mesh: str, hosts: str) -> None:
    for status, output in play("everything", mesh, shared=True, hosts=hosts):
        assert status == 0 and output == "done\n", output


def test_hosts_do_not_wait_for_each_other_in_a_ring() -> None:
    for status, output in play("ring", "replica=2 shard=2", deadline=20, shared=True, hosts="aabb"):
        assert status == 0 and output == "done\n", output


@pytest.mark.parametrize("mesh", ["shard=3", "shard=2 pipe=2"])
def test_the_transport_of_gpus_does_so_too_as_far_as_gloo_can_play_it(mesh: str) -> None:
    for status, output in play("as_on_gpus", mesh):
        assert status == 0 and output == "done\n", output


@pytest.mark.parametrize(
    "mesh",
    [
        "replica=2 shard=2 expert=2",
        "shard=2 tensor=2 context=2 expert=2",
        "pipe=2 shard=2 context=2",
    ],
)
def test_a_training_on_gpus_has_its_groups_as_far_as_gloo_can_play_them(mesh: str) -> None:
    for status, output in play("training_on_gpus", mesh):
        assert status == 0 and output == "done\n", output


def test_the_script_face_on_a_line() -> None:
    for status, output in play("line", "pipe=3"):
        assert status == 0 and output == "done\n", output


def test_a_process_group_that_is_there_is_used_and_left() -> None:
    for status, output in play("on_a_group", "shard=2"):
        assert status == 0 and output == "done\n", output


def test_a_process_group_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: "cuda:nccl")
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=r"torch's process group has cuda:nccl.*'cpu:gloo,cuda:nccl'"):
            ProcessComm.from_env(Mesh(shard=1))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])
def test_a_rank_that_dies_is_noticed_at_once_and_the_operation_is_named(shared: bool) -> None:
    (first, said), (second, _) = play("gone", "shard=2", deadline=3600, shared=shared)
    assert (first, second) == (0, 0), said
    lines = said.splitlines()
    assert re.fullmatch(r"rank 0 lost its connections in sum all_reduce of unit 'blocks.1' over shard .*", lines[0]), (
        said
    )
    assert re.fullmatch(r"  rank 1 \(host .*\): reported nothing: it is gone, or still computing", lines[1])
    assert "broke down earlier" in said  # the second call does not wait again


@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])
def test_ranks_in_different_operations_reach_the_deadline_and_each_is_told_where_the_others_were(shared: bool) -> None:
    outputs = play("disagree", "shard=3", deadline=8, shared=shared)
    assert [status for status, _ in outputs] == [0, 0, 0], outputs
    for rank, (_, said) in enumerate(outputs):
        assert re.search(rf"^rank {rank} .* in all_gather of unit 'blocks.{rank}' over shard", said), said
        assert "microbatch 2" in said
        for other in {0, 1, 2} - {rank}:
            assert re.search(rf"  rank {other} .*: .* in all_gather of unit 'blocks.{other}'", said), said
    assert any("waited 8 s" in said for _, said in outputs)


@pytest.mark.parametrize(("mesh", "shared"), [("shard=2", False), ("replica=3", True)])
def test_with_the_check_each_fault_is_told_at_once(mesh: str, shared: bool) -> None:
    for status, output in play("checked", mesh, deadline=3600, shared=shared):
        assert status == 0 and output == "done\n", output


def test_a_message_of_another_shape_is_not_taken_in() -> None:
    (_, sender), (_, receiver) = play("other_shape", "shard=2", deadline=8)
    assert re.search(
        r"^rank 0 .* in send over shard \(12 x float32, phase 'wrong'\)\n  rank 1 \(host .*: ", sender, re.M
    ), sender
    assert re.search(
        r"^rank 1 .* in recv over shard \(12 x float32, phase 'wanted'\)\n  rank 0 \(host .*: ", receiver, re.M
    )


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        port = held.getsockname()[1]
        [(status, output)] = play("alone", "shard=1", port=port)
    assert status == 1
    assert f"ConnectionError: rank 0 cannot listen on 127.0.0.1:{port}: the port is in use: another process" in output


def test_ranks_that_never_come_are_named() -> None:
    [(status, output)] = play("alone", "shard=3", ranks=1, deadline=1.5)
    assert status == 1
    assert re.search(r"TimeoutError: rank 0 waited [\d.]+ s .*: ranks 1, 2 did not come", output), output
    assert "MASTER_ADDR=127.0.0.1 is each host itself" in output


def test_one_process_is_a_world_too() -> None:
    assert play("alone", "shard=1") == [(0, "done\n")]


def test_a_world_that_does_not_fill_the_mesh_is_refused_before_anything(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"'replica=2 shard=3' has 6 ranks, but 4 processes were started: start 6"):
        ProcessComm.from_env(Mesh(replica=2, shard=3))


def test_without_torchrun_the_missing_variables_are_named(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: .* torchrun"):
        ProcessComm.from_env(Mesh(shard=2))
    with pytest.raises(ValueError, match="not set"):
        init()


def test_ranks_that_differ_are_named_on_every_rank() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        meshes = ["shard=3", "shard=3", "pipe=3"]
        played = [pool.submit(play_one, "alone", mesh, rank, 3, port) for rank, mesh in enumerate(meshes)]
        for status, output in (future.result() for future in played):
            assert status == 1
            assert "ValueError: ranks differ: mesh is shard=3 on ranks 0, 1, pipe=3 on rank 2" in output, output
