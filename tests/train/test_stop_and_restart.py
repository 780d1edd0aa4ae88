"""``plait train`` that gets a signal, or loses a rank, equals an undisturbed run, to the bit."""

import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_cases import SIZES, made, write_text
from waiting import children, wait_for

from plait.checkpoint.folder import checkpoints
from plait.run.commands.main import main, parse
from plait.run.config.file import to_toml
from plait.run.config.settings import TrainConfig
from plait.run.train.resume import has_settings, newest_sound, restarted


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = ["--batch", "6", "--data", write_text(tmp_path_factory, 90)]
    return ["train", *SIZES, *data, "--mesh", "shard=3", "--save-every", "3"]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing befell."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*flags, "--world", "thread", "--steps", "24", "--out", str(out)]) == 0
    return out


def config_of(words: list[str]) -> TrainConfig:
    config = parse(words)
    assert isinstance(config, TrainConfig)
    return config


def lines_in(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def check_same_end(out: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every number of every step, and all of the last checkpoint but the command's own words."""
    assert made(out) == made(whole)
    capsys.readouterr()
    main(["checkpoint", "diff", *(str(checkpoints(folder / "checkpoints")[-1]) for folder in (out, whole))])
    *differences, _ = capsys.readouterr().out.splitlines()
    names = {line.partition(":")[0] for line in differences}
    assert names <= {f"extra.config.{name}" for name in ("out", "resume", "restarts", "world", "log_every")}


def test_a_signal_saves_the_step_that_all_made_and_none_is_lost(
    flags: list[str], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = [*flags, "--world", "thread", "--steps", "24", "--out", str(out)]

    def send() -> None:
        wait_for(lambda: lines_in(out) >= 4)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    assert main(words) == 128 + signal.SIGUSR1
    sender.join()
    steps = lines_in(out)
    assert str(checkpoints(out / "checkpoints")[-1]).endswith(f"step-{steps:06d}")
    told = capsys.readouterr().err
    assert "plait: SIGUSR1: all ranks end after their step, within 60 s" in told
    assert re.search(rf"stopped after step {steps} of 24; saved in .*step-{steps:06d}", told)
    assert main([*words, "--resume", "auto"]) == 0
    check_same_end(out, whole, capsys)


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_taken(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*flags, "--world", "thread", "--steps", "6", "--out", str(tmp_path)]
    assert main(words) == 0
    config = replace(config_of(words), restarts=1)
    first, second = checkpoints(tmp_path / "checkpoints")
    assert newest_sound(config) == str(second)
    file = next(Path(str(second)).glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert newest_sound(config) == str(first)
    assert file.name in (told := capsys.readouterr().err) and "put aside as" in told
    assert [str(folder) for folder in checkpoints(tmp_path / "checkpoints")] == [str(first)]
    assert restarted(config, 1, True).output.resume == "auto"


def test_another_attempt_begins_as_the_first_did_and_never_over_another_run(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [*flags, "--steps", "6", "--out", str(out), "--resume", "other", "--restarts", "2"]
    config = config_of(words)
    assert restarted(config, 0, True) == config == restarted(config, 1, False)
    assert restarted(config, 1, True) == config, "nothing was written yet"
    out.mkdir()
    (out / "config.toml").write_text(to_toml(config))
    again = restarted(config, 1, True)
    assert (again.output.resume, again.output.overwrite) == ("other", True), "nothing was saved yet"
    assert restarted(config, 1, False) == config, "what is there is of a run before this launch"
    assert not restarted(replace(config, seed=9), 1, True).output.overwrite, "the run of another seed"
    (out / "summary.json").touch()
    assert not restarted(config, 1, True).output.overwrite, "a run that is finished"


def test_what_follows_the_last_step_is_missed(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = [*flags, "--world", "thread", "--steps", "6", "--out", str(out)]
    assert main(words) == 0
    assert main([*words, "--overwrite", "--inject", "exception@rank=0,step=2"]) == 1
    assert not (out / "summary.json").exists(), "of the run before"
    assert main([*words, "--overwrite"]) == 0
    capsys.readouterr()
    assert main([*words, "--resume", "auto", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert "nothing is left to do" in told.err and not told.out
    (out / "summary.json").unlink()  # as if it had been killed after its last checkpoint
    assert main([*words, "--resume", "auto"]) == 2
    assert "step-000006' has all steps of the run" in capsys.readouterr().err
    config = config_of(words)
    with pytest.raises(ValueError, match="has all steps of the run"):
        newest_sound(config)


def test_another_attempt_goes_on_where_this_launch_has_written(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    out = tmp_path / "run"
    words = [*flags, "--steps", "6", "--out", str(out), "--overwrite"]
    config = config_of(words)
    assert not has_settings(config), "it has begun nothing"
    assert main([*words, "--world", "thread"]) == 0
    assert has_settings(config)
    time.sleep(0.05)  # ticks of the kernel are hundredths of a second
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    agent = start("env", "-u", "TORCHELASTIC_RUN_ID", "sleep", "60")
    behind = [Path(f"/proc/{agent.pid}/{name}") for name in ("cmdline", "environ")]
    wait_for(lambda: behind[0].read_bytes().startswith(b"sleep") and bool(behind[1].read_bytes()))
    monkeypatch.setattr(os, "getppid", lambda: agent.pid)
    assert not has_settings(config), "what is there is of a run before this launch"
    time.sleep(0.05)  # and the clock of files may lag
    (out / "config.toml").touch()
    assert has_settings(config)
    again = restarted(config, 1, True)
    assert (again.output.resume, again.output.overwrite) == ("auto", False)


def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_end(
    flags: list[str], whole: Path, tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = [*flags, "--steps", "24", "--out", str(out), "--restarts", "1", "--log-every", "1000"]
    process = start(sys.executable, "-m", "plait", *words)
    wait_for(lambda: lines_in(out) >= 7)
    (server,) = children(process.pid)
    os.kill(sorted(children(server))[1], signal.SIGKILL)
    _, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert re.match(r"plait: rank 1 was killed by SIGKILL\n  on host .*in step \d+ \(counted from 0\), ", err)
    assert "\n  rank 0: " in err and "\n  rank 2: " in err
    assert re.search(r"plait: restart 1 of 1, from .*step-0000\d\d\n", err)
    check_same_end(out, whole, capsys)
