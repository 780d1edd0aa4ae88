"""The page of a finished run: its numbers are those of the run, and of the planner where the machine is described."""

import json
from pathlib import Path
from typing import Any

import pytest

from plait.run.commands.main import main
from plait.run.job.config import JobConfig
from plait.run.job.job import build_model
from plait.run.job.outline import transformer_of
from plait.run.report.page.saved import saved_reports

CLUSTER = """
memory_gb = 8
memory_gbs = 20
units = 1
tflops = { fp32 = 0.1, bf16 = 0.2 }
inside = { gbs = 5, latency_us = 20 }
between = { gbs = 1, latency_us = 50 }
"""
SIZES = "--layers 1 --width 32 --heads 2 --kv-heads 2 --length 16 --batch 8 --steps 4 --world thread --eval-every 2"


def described(folder: Path) -> tuple[Path, list[str]]:
    """Where a run on a machine that is described leaves its files, and its command."""
    (folder / "text").write_text("one and two and three " * 200)
    (folder / "cluster.toml").write_text(CLUSTER)
    words = ["train", *SIZES.split(), "--data", str(folder / "text")]
    return folder / "out", [*words, "--out", str(folder / "out"), "--cluster", str(folder / "cluster.toml")]


@pytest.mark.parametrize("mesh", ["shard=2", "pipe=2 shard=2", "shard=2 tensor=2"])
def test_a_run_leaves_its_report(mesh: str, tmp_path: Path) -> None:
    out, words = described(tmp_path)
    assert main([*words, "--mesh", mesh, "--microbatches", "2"]) == 0
    (report,), summary = saved_reports(str(out)), json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert report["curves"]["values"]["loss"] == [line["loss"] for line in lines]
    assert [one is None for one in report["curves"]["values"]["held-out loss"]] == [True, False, True, False]
    numbers = {name: row for name, *row in report["numbers"]}
    rank = summary["bytes_per_rank"][0]
    assert numbers["bytes sent in a step"][:2] == [rank["sent_predicted"], rank["sent_measured"]]
    for column in ("predicted", "measured"):
        assert sum(line[column] for line in report["messages"]) == rank[f"sent_{column}"]
    predicted, measured, _ = numbers["MFU"]
    assert 0 < measured < predicted < 100 and numbers["seconds a step"][0] > 0
    assert min(curve := report["curves"]["values"]["MFU, %"]) <= measured <= max(curve)
    steps = report["timelines"]
    assert len(steps["measured"]) == len(steps["simulated"]) == 2
    passes = [[box[:3] for box in one["compute"]] for one in steps["measured"]]
    assert passes == [[box[:3] for box in one["compute"]] for one in steps["simulated"]]
    assert {2 * 2} == {sum(box[0] < 2 for box in one["compute"]) for one in steps["measured"]}
    assert "ranks compute" in report["limit"] and report["change"]


JOB = """
import torch, plait
from torch import nn

def batch(step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

job = plait.UserJob(
    lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),
    lambda model, x: (model(x) - x).square().sum(), batch, optimizer=torch.optim.AdamW,
)
"""


@pytest.mark.parametrize("loss", ["(model(x) - x)", "{'cpu': 1.0}[x.device.type] * (model(x) - x)"])
def test_a_job_of_a_user_is_counted_too_if_it_runs_on_meta(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(JOB.replace("(model(x) - x)", loss))
    Path("cluster.toml").write_text(CLUSTER)
    words = ["--mesh", "shard=2", "--steps", "3", "--world", "thread", "--cluster", "cluster.toml", "--out", "out"]
    assert main(["train", "--job", f"{tmp_path}/mine.py:job", *words]) == 0
    (report,) = saved_reports("out")
    numbers = {name: row for name, *row in report["numbers"]}
    assert ("MFU" in numbers) == ("cpu" not in loss) and Path("out/summary.json").is_file()
    assert "MFU" not in numbers or 0 < numbers["MFU"][0] < 100


@pytest.mark.parametrize("kind", ["gpt", "llama", "qwen2", "moe"])
def test_the_planner_sees_all_parameters_of_a_model(kind: str) -> None:
    task = JobConfig(model=kind, layers=3, width=32, heads=4, kv_heads=2, ffn=48, length=8)
    found = transformer_of(task.sizes)
    assert found is not None and found.num_parameters == sum(p.numel() for p in build_model(task).parameters())


@pytest.mark.parametrize(
    "more", ["--dtype fp64 --mesh shard=2", "--batch 7 --mesh shard=2 --ragged", "--mesh shard=2 --dtype bf16"]
)
def test_a_run_that_the_planner_cannot_count_has_a_report_all_the_same(more: str, tmp_path: Path) -> None:
    out, words = described(tmp_path)
    assert main([*words, *more.split()]) == 0
    (report,) = saved_reports(str(out))
    counted = "MFU" in {name for name, *_ in report["numbers"]}
    assert counted == more.endswith("bf16")


def test_a_machine_that_is_not_described_leaves_out_what_follows_from_it(tmp_path: Path, capfd: Any) -> None:
    out, described_words = described(tmp_path)
    words = [*described_words[:-4], "--mesh", "shard=2"]
    assert main([*words, "--out", str(out)]) == 0
    (report,) = saved_reports(str(out))
    assert "MFU" not in {name for name, *_ in report["numbers"]} and "plait doctor --calibrate" in report["change"]
    capfd.readouterr()
    assert main([*words, "--cluster", str(tmp_path / "none.toml"), "--out", str(out), "--overwrite"]) == 2
    assert "cannot read the cluster" in capfd.readouterr().err
