"""Processes as ranks, on gloo. Each scene is played once, by real processes (``comm_ranks.py``)."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ports import free_port

from plait.comm import ProcessComm
from plait.table.mesh import Mesh

RANKS = Path(__file__).with_name("comm_ranks.py")


def torchrun(rank: int, size: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The variables of a rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def play(
    scene: str, mesh: str, *, ranks: int | None = None, port: int | None = None, **how: Any
) -> list[tuple[int, str]]:
    """Exit status and output of each rank; ``ranks`` of them start (all, unless told)."""
    size, port = Mesh.parse(mesh).size, port or free_port()
    count = size if ranks is None else ranks
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: play_one(scene, mesh, rank, size, port, **how), range(count)))


def play_one(
    scene: str,
    mesh: str,
    rank: int,
    size: int,
    port: int,
    *,
    deadline: float = 30,
    shared: bool = False,
    hosts: str = "",
) -> tuple[int, str]:
    """``hosts`` has a letter for each rank's."""
    env = os.environ | torchrun(rank, size, port) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(RANKS), scene, mesh, str(deadline)]
    command += ["shared" if shared else "", *([hosts] if hosts else [])]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output = process.communicate(timeout=110)[0]
        finally:
            process.kill()
    return process.returncode, output


PLAYED: list[tuple[str, str, dict[str, Any]]] = [
    # scene, mesh, how it is played
    *(("everything", mesh, {}) for mesh in ("shard=2", "shard=3", "shard=2 replica=2")),
    ("everything", "shard=3", {"shared": True}),
    ("everything", "shard=3", {"shared": True, "hosts": "aab"}),
    ("everything", "shard=2 replica=2", {"shared": True, "hosts": "abba"}),
    ("ring", "replica=2 shard=2", {"deadline": 20, "shared": True, "hosts": "aabb"}),
    ("as_on_gpus", "shard=3", {}),
    ("as_on_gpus", "shard=2 pipe=2", {}),
    ("training_on_gpus", "replica=2 shard=2 expert=2", {}),
    ("training_on_gpus", "shard=2 tensor=2 context=2 expert=2", {}),
    ("training_on_gpus", "pipe=2 shard=2 context=2", {}),
    ("line", "pipe=3", {}),
    ("on_a_group", "shard=2", {}),
    ("checked", "shard=2", {"deadline": 3600}),
    ("checked", "replica=3", {"deadline": 3600, "shared": True}),
    ("alone", "shard=1", {}),
]


@pytest.mark.parametrize(("scene", "mesh", "how"), PLAYED)
def test_a_scene_ends_well(scene: str, mesh: str, how: dict[str, Any]) -> None:
    for status, output in play(scene, mesh, **how):
        assert status == 0 and output == "done\n", output


def test_a_process_group_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: "cuda:nccl")
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for name, value in torchrun(0, 1, 1).items():
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


def test_a_message_of_another_shape_is_not_taken_in() -> None:
    (_, sender), (_, receiver) = play("other_shape", "shard=2", deadline=8)
    assert re.search(
        r"^rank 0 .* in send over shard \(12 x float32, phase 'wrong'\)\n  rank 1 \(host .*: ", sender, re.M
    ), sender
    assert re.search(
        r"^rank 1 .* in recv over shard \(12 x float32, phase 'wanted'\)\n  rank 0 \(host .*: ", receiver, re.M
    )


def test_ranks_that_never_come_are_named() -> None:
    [(status, output)] = play("alone", "shard=3", ranks=1, deadline=1.5)
    assert status == 1
    assert re.search(r"TimeoutError: rank 0 waited [\d.]+ s .*: ranks 1, 2 did not come", output), output
    assert "MASTER_ADDR=127.0.0.1 is each host itself" in output


def test_ranks_that_differ_are_named_on_every_rank() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        meshes = ["shard=3", "shard=3", "pipe=3"]
        played = [pool.submit(play_one, "alone", mesh, rank, 3, port) for rank, mesh in enumerate(meshes)]
        for status, output in (future.result() for future in played):
            assert status == 1
            assert "ValueError: ranks differ: mesh is shard=3 on ranks 0, 1, pipe=3 on rank 2" in output, output
