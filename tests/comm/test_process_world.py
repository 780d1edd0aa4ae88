"""Processes as ranks, on gloo. Each scene is played once, by real processes (``comm_ranks.py``)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.comm import ProcessComm, init
from plait.core.mesh import Mesh

RANKS = Path(__file__).with_name("comm_ranks.py")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def play(
    scene: str, mesh: str, *, deadline: float = 30, ranks: int | None = None, port: int | None = None
) -> list[tuple[int, str]]:
    """Exit status and output of each rank; ``ranks`` of them are started (all, unless told)."""
    size, port = Mesh.parse(mesh).size, port or free_port()
    processes = []
    for rank in range(size if ranks is None else ranks):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", str(RANKS), scene, mesh, str(deadline)]
        processes.append(
            subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        outputs = [p.communicate(timeout=60)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "shard=2 replica=2"])
def test_does_what_every_world_does(mesh: str) -> None:
    for status, output in play("everything", mesh):
        assert status == 0 and output == "done\n", output


def test_the_script_face_on_a_line() -> None:
    for status, output in play("line", "pipe=3"):
        assert status == 0 and output == "done\n", output


def test_a_rank_that_dies_is_noticed_at_once_and_the_operation_is_named() -> None:
    (first, said), (second, _) = play("gone", "shard=2", deadline=20)
    assert (first, second) == (0, 0), said
    lines = said.splitlines()
    assert re.fullmatch(r"rank 0 lost its connections in sum all_reduce of unit 'blocks.1' over shard .*", lines[0]), (
        said
    )
    assert lines[1] == "  rank 1: left no word: it is gone, or still computing"
    assert "broke down earlier" in said  # the second call does not wait again


def test_ranks_in_different_operations_reach_the_deadline_and_each_is_told_where_the_others_were() -> None:
    outputs = play("disagree", "shard=3", deadline=2)
    assert [status for status, _ in outputs] == [0, 0, 0], outputs
    for rank, (_, said) in enumerate(outputs):
        assert re.search(rf"^rank {rank} .* in all_gather of unit 'blocks.{rank}' over shard", said), said
        assert "microbatch 2" in said
        for other in {0, 1, 2} - {rank}:
            assert re.search(rf"  rank {other}: .* in all_gather of unit 'blocks.{other}'", said), said
    assert any("waited 2 s" in said for _, said in outputs)


def test_the_parts_of_a_message_share_a_deadline() -> None:
    _, (status, said) = play("late", "shard=2", deadline=3)
    assert status == 0 and float(said.split()[0]) < 2, said  # 2 s of it for last words


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        port = held.getsockname()[1]
        [(status, output)] = play("alone", "shard=1", port=port)
    assert status == 1
    assert f"ConnectionError: rank 0 cannot listen on 127.0.0.1:{port}: the port is in use. Set MASTER_PORT" in output


def test_ranks_that_never_come_are_named() -> None:
    started = time.monotonic()
    [(status, output)] = play("alone", "shard=3", ranks=1, deadline=1.5)
    assert status == 1 and time.monotonic() - started < 30
    assert re.search(r"TimeoutError: rank 0 waited 1.5 s .*: ranks 1, 2 did not come", output), output


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
