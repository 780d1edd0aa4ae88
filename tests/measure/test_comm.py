"""Measurements: collectives, and a machine for the planner."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from plait.comm import Comm, run
from plait.comm.thread import ThreadComm
from plait.predict.cluster import PRESETS, Cluster, parse_cluster
from plait.predict.duration import block_passes, stream_traffic
from plait.run.commands.main import main
from plait.run.config.machine import MachineConfig
from plait.run.measure import calibrate
from plait.run.measure.calibrate import to_toml
from plait.run.measure.comm import BenchConfig, measure, parse_size
from plait.run.measure.layouts import measure_layout
from plait.run.measure.operations import COLLECTIVES, build
from plait.run.models.gpt import GPTConfig
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


SIZES = "--model gpt --layers 2 --width 32 --heads 2 --vocab 256 --batch 8 --length 16 --dtype fp32"


@pytest.mark.parametrize("name", PRESETS)
def test_a_cluster_is_read_back_as_it_was_written(name: str) -> None:
    device = replace(PRESETS[name].device, attention={"bf16": 1e14})
    asked = replace(PRESETS[name], device=device, kind="cpu", world="thread", hosts=3, turns=2.0)
    found = parse_cluster(tomli_w.dumps(to_toml(asked)), "x.toml")

    def figures(one: Cluster) -> list[float]:
        links = (one.inside.bandwidth, one.inside.latency, one.between.bandwidth, one.between.latency)
        device = one.device
        return [
            device.memory,
            device.bandwidth,
            device.units,
            device.launch,
            *device.peak.values(),
            one.attention("bf16"),
            *links,
        ]

    assert figures(found) == pytest.approx(figures(asked))
    assert replace(found, device=asked.device, inside=asked.inside, between=asked.between) == asked


@pytest.mark.parametrize("sizes", [{"passes": 2.5, "product": 0.8}, {"passes": 0.4, "product": 1.3}], ids=str)
def test_a_machine_of_known_figures_is_found_again(sizes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of each work are those that the planner says, of a machine that reaches these shares."""
    flop, rate, launch = 1e-9, 4e9, 1e-5
    known = replace(PRESETS["h100"].reached, depth=1.0, memory=1.0, kernels=100.0, calls=1.0, starts=1.0, **sizes)
    device = replace(PRESETS["h100"].device, bandwidth=2 * rate, units=1, launch=launch)
    device = replace(device, peak={"fp32": (1 + 1 / 512) / flop}, attention={"fp32": 1e9})
    machine = replace(PRESETS["h100"], device=device, reached=known)

    def seconds(comm: Comm, works: dict[str, Any]) -> dict[str, float]:
        sizes_of = GPTConfig(width=256, num_layers=1, num_heads=8, num_kv_heads=8, max_length=256, dropout=0.0)
        block = calibrate._sizes(sizes_of, 8)
        whole = sum(one.total for one in block_passes(block, machine, "fp32", 0.0))
        took = dict.fromkeys(works, 0.0) | {"launch": 200 * launch, "tiny": 300 * launch, "block": whole}
        took |= {name: 2 * 512**3 * flop for name in works if name.startswith("product")}
        took |= {name: 4 * 8 * 8 * 256**2 * 64 / 1e9 for name in works if name.startswith("attention")}
        took |= {"narrow": took["product fp32"] / 16 * (1 + 1 / 32) / (1 + 1 / 512), "block alone": whole}
        return took | {"stream": 3 * stream_traffic(block) * sizes["passes"] / device.bandwidth}

    monkeypatch.setattr(calibrate, "_seconds", seconds)
    monkeypatch.setattr(calibrate, "copy_rate", lambda *_, **more: rate)
    (found,) = run(Mesh(), lambda comm: calibrate.calibrate(MachineConfig(), comm, 1e9, 1).reached)
    assert {name: getattr(found, name) for name in sizes} == pytest.approx(sizes, rel=1e-6)
    assert (found.depth, found.kernels) == pytest.approx((1.0, 100.0), rel=1e-6)


def test_a_layout_that_cannot_run_says_why() -> None:
    with pytest.raises(ValueError, match=r"ended with code 2: .*no such row"):
        measure_layout('strategy = "no such row"\n')


def test_a_measured_machine_plans_and_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, result = tmp_path / "here.toml", tmp_path / "plan.json"
    words, also = ["doctor", "--calibrate", str(file), "--world", "thread"], tmp_path / "here.json"
    assert main([*words, "--mesh", "shard=2", "--json", str(also)]) == 0
    assert json.loads(also.read_text())["tflops"] == tomllib.loads(file.read_text())["tflops"]
    assert main([*words, "--mesh", "shard=2 hosts=2"]) == 2
    cluster = parse_cluster(file.read_text(), str(file))
    assert (cluster.kind, cluster.world, cluster.size) == ("cpu", "thread", 2)
    assert 1e8 < cluster.peak("fp32") < 1e14 and 1e8 < cluster.device.bandwidth < 1e13
    assert main(["plan", *SIZES.split(), "--cluster", str(file), "--measure", "2", "--json", str(result)]) == 0
    runs = json.loads(result.read_text())["measured"]
    assert len(runs) == 2 and "mean error" in capfd.readouterr().out
    for one in runs:
        assert one["seconds"][0] > 0 and one["seconds"][1] > 0
        assert one["state"][1] == pytest.approx(one["state"][0], rel=0.01)
        assert one["sent"][1] == pytest.approx(one["sent"][0], rel=0.05)
    assert main(["doctor", "--calibrate", str(tmp_path / "no" / "here.toml")]) == 2
