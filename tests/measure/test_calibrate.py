"""This machine as the planner reads it: measured, written, read back, and used for a plan that is then run."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from plait.predict.cluster import PRESETS, Cluster, parse_cluster
from plait.run.commands.main import main
from plait.run.measure.calibrate import to_toml
from plait.run.measure.layouts import measure_layout

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
    for run in runs:
        assert run["seconds"][0] > 0 and run["seconds"][1] > 0
        assert run["state"][1] == pytest.approx(run["state"][0], rel=0.01)
        assert run["sent"][1] == pytest.approx(run["sent"][0], rel=0.05)
    assert main(["doctor", "--calibrate", str(tmp_path / "no" / "here.toml")]) == 2
