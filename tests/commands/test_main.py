"""The command as its user sees it: exit codes, one line per mistake, help for every command."""

import errno
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import plait
from plait.run.commands.main import main, parse
from plait.run.config.file import to_toml
from plait.run.config.settings import TrainConfig, VerifyConfig, with_job
from plait.run.measure.comm import BenchConfig


@pytest.mark.parametrize("line", ["X", "train X", "train --nonfinite X", "checkpoint X", "schedule draw 1f1b --X"])
def test_nothing_that_a_terminal_obeys_is_in_a_usage_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.replace("X", "\x1b[2Jx").split(" ")) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("plait: error: ") and "\x1b" not in shown.err


SHARED = ["task.network", "task.samples", "task.update", "layout", "machine", "files"]
GROUPS = {"train": [*SHARED, "course", "output"], "verify": [*SHARED, "comparison"]}


@pytest.mark.parametrize("command", ["train", "verify", "schedule", "schedule show", "doctor", "bench"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"plait {command}" in shown
    groups = re.findall(r"^\W*([\w.]+) options\b", shown, re.MULTILINE)
    assert groups == GROUPS.get(command, [])


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_help_text_that_nobody_takes_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["train", "--help"], ["--help"]):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", Full())
            assert main(words) == 1
        assert capsys.readouterr().err == "plait: error: the standard output takes no more: No space left on device\n"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('mesh = "replica=2"\nsteps = 7\nmicrobatches = 3\n')
    for words in (["--config", str(file)], [f"--config={file}"]):
        config = parse(["train", *words, "--steps", "9"])
        assert config == TrainConfig(config=str(file), mesh="replica=2", steps=9, microbatches=3)


def test_verify_reads_the_file_that_a_run_has_written(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(TrainConfig(mesh="shard=3", out="runs/a", save_every=5, keep=2, log_every=3)))
    config = parse(["verify", "--config", str(file)])
    assert isinstance(config, VerifyConfig) and config.machine.mesh == "shard=3"
    file.write_text("spread = 3\n")
    with pytest.raises(ValueError, match="unknown key 'spread'"):
        parse(["train", "--config", str(file)])


def test_steps_beside_the_epochs_of_a_file_are_refused_unless_a_flag_takes_them_back(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("epochs = 2\n")
    words = ["train", "--config", str(file)]
    with pytest.raises(ValueError, match=r"--steps 9 beside epochs 2 of .*run.toml"):
        parse([*words, "--steps", "9"])
    with pytest.raises(ValueError, match=r"--steps 9 beside epochs 3, which"):
        parse([*words, "--epochs=3", "--steps", "9"])
    assert parse([*words, "--steps", "9", "--epochs", "None"]).task.samples.steps == 9
    assert parse([*words, "--epochs", "3"]).task.samples.epochs == 3
    file.write_text("steps = 7\n")
    assert parse([*words, "--epochs", "3"]).task.samples.epochs == 3, "flags win over the file"


def test_flags_reach_the_config() -> None:
    config = parse(["verify", "--mesh", "replica=2 shard=2", "--no-ragged", "--clip", "None", "--json", "-"])
    assert config == VerifyConfig(mesh="replica=2 shard=2", ragged=False, clip=None, json="-")
    assert parse(["bench", "comm", "--sizes", "1KB", "1MB"]) == BenchConfig(sizes=("1KB", "1MB"))


def test_a_fault_of_ours_or_the_users_code_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        return int("no number")  # a ValueError, but not plait refusing an input

    monkeypatch.setattr("plait.run.commands.bench.run_bench", broken)
    assert main(["bench", "comm", "--world", "thread"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "invalid literal for int()" in shown
    assert "in broken" in shown


JOB = """
import sys, torch, plait
job = plait.UserJob(lambda: torch.nn.Linear(2, 1), lambda model, x: {loss}, lambda step: {batch})
"""


@pytest.mark.parametrize("place", ["loss", "batch"])
def test_a_job_that_ends_the_program_has_failed(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {"loss": "model(x).sum()", "batch": "torch.ones(4, 2)", place: "sys.exit(0)"}
    (tmp_path / "job.py").write_text(JOB.format(**code))
    assert main(["verify", "--steps", "1", "--job", f"{tmp_path}/job.py:job"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"plait: error: {tmp_path}/job.py:3 ended the program in <lambda> (SystemExit: 0)")
    assert shown.count("\n") == 1 and ("raised on rank" in shown) == (place == "loss")


def test_the_file_of_a_jobs_run_says_what_the_job_says(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.format(loss="model(x).sum()", batch="torch.ones(4, 2)"))
    first = with_job(TrainConfig(job=f"{tmp_path}/job.py:job"))
    (tmp_path / "run.toml").write_text(to_toml(first))
    for command in ("train", "verify"):
        again = parse([command, "--config", str(tmp_path / "run.toml")])
        assert isinstance(again, TrainConfig | VerifyConfig)
        task = with_job(again).task
        assert (task.samples.batch, task.update.lr) == (4, first.task.update.lr)
        with pytest.raises(ValueError, match="batch 5 beside job"):
            with_job(replace(again, batch=5))


def test_a_command_says_that_gpus_are_idle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("plait.comm.environment.NVIDIA", os.getcwd())
    words = ["train", "--model", "mlp", "--layers", "2", "--steps", "1", "--mesh", "shard=2", "--world", "thread"]
    assert main(words) == 0
    assert "plait: computing on CPUs: this host has NVIDIA GPUs, but torch" in capsys.readouterr().err
    assert main([*words, "--device", "cpu"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "bars"),
    [
        ("verify --steps 2 --model mlp --layers 2", ["layout", "one process", "plain"]),
        ("prove --mesh shard=2 --layers 2 --width 8 --heads 2 --vocab 9", ["ranks", "sta"]),
        ("checkpoint verify {0}", ["files read"]),
        ("checkpoint diff {0} {0}", ["places"]),
    ],
)
def test_work_has_a_bar_on_a_terminal_alone(
    words: str, bars: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = torch.nn.Linear(3, 2)
    plait.run_threads("shard=1", lambda comm: plait.save(tmp_path / "one", plait.Engine(net, comm, strategy="ddp")))
    command = words.format(tmp_path / "one").split()
    assert main(command) == 0
    assert not capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(command) == 0
    shown = capsys.readouterr().err
    assert all(bar in shown for bar in bars)


def test_a_shell_completes_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tyro-print-completion", "bash"])
    script = capsys.readouterr().out
    assert "--lr-schedule" in script and "--kv-heads" in script and "export-dcp" in script


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"plait {plait.__version__} (torch ") and shown.count("\n") == 1


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure", "--json", "-"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts["processor"]["cores"] == os.cpu_count()
    assert facts["memory"]["total_bytes"] > 1 << 28
    assert facts["software"]["gloo"] is True
    assert isinstance(facts["warnings"], list)
    assert "processor" in shown.err
