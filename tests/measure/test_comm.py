"""``plait bench comm`` in the thread world, its arithmetic, and that a wrong collective is caught."""

import json
from dataclasses import replace

import pytest

from plait.comm.base import Comm
from plait.comm.run_threads import run
from plait.comm.thread import ThreadComm
from plait.run.commands.main import main
from plait.run.measure.comm import BenchConfig, measure, parse_size
from plait.run.measure.operations import COLLECTIVES, build
from plait.table.collectives import bus_factor
from plait.table.mesh import Mesh

QUICK = BenchConfig(world="thread", sizes=("1KB", "64KB"), repeat=3, warmup=1)


@pytest.mark.parametrize("mesh", [Mesh(shard=2), Mesh(replica=2, shard=3)])
def test_every_collective_is_right_and_measured_alike_on_all_ranks(mesh: Mesh) -> None:
    ranks = run(mesh, lambda comm: measure(QUICK, comm))
    assert all(results == ranks[0] for results in ranks)
    assert {r.kind for r in ranks[0]} == {"ping_pong", *COLLECTIVES}
    for r in ranks[0]:
        assert 0 < r.seconds_min <= r.seconds <= r.seconds_max
        assert r.ranks == (2 if r.kind == "ping_pong" else mesh.size)
        # S is the size of the whole array, rounded up to equal pieces, never a piece's size
        assert any(size <= r.bytes < size + 4 * mesh.size for size in (8, 1024, 65536))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_world_that_moves_something_else_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(ThreadComm, f"_{kind}")

    def spoiled(self, call, first, *rest):  # type: ignore[no-untyped-def]
        work = original(self, call, first, *rest)
        result = first if first is not None else None
        if result is not None:
            result[-1] += 1
        return work

    monkeypatch.setattr(ThreadComm, f"_{kind}", spoiled)

    def check(comm: Comm) -> None:
        build(kind, comm, 256).check()

    with pytest.raises(RuntimeError, match=f"{kind} of 256 bytes is wrong from element"):
        run(Mesh(shard=2), check)


def test_the_command_writes_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", "--world", "thread", "--sizes", "4KB", "--repeat", "2", "--json", "-"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["config"]["mesh"] == "shard=2"
    assert [r["kind"] for r in answer["results"]] == ["ping_pong"] * 2 + list(COLLECTIVES)
    for r in answer["results"]:
        assert r["algbw"] == pytest.approx(r["bytes"] / r["seconds"])
        factor = 1 if r["kind"] == "ping_pong" else bus_factor(r["kind"], 2)
        assert r["busbw"] == pytest.approx(r["algbw"] * factor)
    assert "all_reduce" in shown.err


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("4KB", 4096), ("1 MiB", 1 << 20), ("16m", 1 << 24), ("1GB", 1 << 30), ("8B", 8)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KB", "0", "-1KB", "1.5MB", "4XB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the size"):
        parse_size(text)


def test_a_size_is_rounded_up_to_equal_pieces() -> None:
    config = replace(QUICK, sizes=("10",), kinds=("all_gather",))
    found = run(Mesh(shard=3), lambda comm: measure(config, comm))[0]
    assert [r.bytes for r in found if r.kind == "all_gather"] == [12]
