"""A run whose disk fills up or vanishes: one line, exit code 1, whole lines, and the checkpoint before it loads."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import small_disk

from plait.run.commands.main import main

RUN = "train --model mlp --layers 4 --width 64 --batch 8 --mesh shard=2 --log-every 1000"
LINE = re.compile(
    r"plait: error: (.*); need \d+ bytes, have \d+ bytes: '(.*)' \(raised on rank \d of 2, mesh shard=2\)\n"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Half a MiB."""
    with small_disk(tmp_path / "disk", "512k") as place:
        yield place


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The reason and the path of the one line."""
    found = LINE.fullmatch(text := capsys.readouterr().err)
    assert found, text
    return found[1], found[2]


def train(place: Path, *more: str, world: str = "thread") -> int:
    return main([*RUN.split(), "--world", world, "--out", str(place / "run"), *more])


def steps(place: Path) -> list[int]:
    """The steps of the metrics, each line whole."""
    text = (place / "run" / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_processes_say_it_once_and_leave_together(disk: Path) -> None:
    (disk / "fill").write_bytes(b"x" * 60_000)
    words = [*RUN.split(), "--steps", "300", "--save-every", "2", "--out", str(disk / "run"), "--deadline", "60"]
    done = subprocess.run([sys.executable, "-m", "plait", *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device; need " in done.stderr and f"'{disk}/run/checkpoints" in done.stderr
    assert main(["checkpoint", "verify", str(disk / "run")]) == 0


def test_a_summary_that_finds_no_room(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "fill").write_bytes(b"x" * 504_000)
    assert train(disk, "--steps", "4") == 1
    reason, path = said(capsys)
    assert "No space left" in reason and path.startswith(str(disk / "run")) and steps(disk) == [1, 2, 3, 4]
    left = set(os.listdir(disk / "run"))
    assert left <= {"metrics.jsonl", "config.toml", "trace.json"}, "and nothing that is half of a file"


def test_a_full_disk_is_refused_before_the_run(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(disk / "fill", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    assert train(disk, "--steps", "4") == 2
    assert "No space left on device, 0 bytes are free" in capsys.readouterr().err
    (disk / "fill").write_bytes(b"x" * 400_000)
    assert train(disk, "--steps", "4", "--save-every", "1") == 2
    assert re.search(r"need \d[\d,]* bytes, have \d[\d,]* bytes", capsys.readouterr().err)


def test_a_run_never_takes_anothers_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "summary.json", "config.toml", "trace.json", "report.html"):
        folder = tmp_path / name
        (folder / "run").mkdir(parents=True)
        (folder / "run" / name).write_text("mine")
        assert train(folder, "--steps", "1") == 2
        assert f"has the {name} of an earlier run" in capsys.readouterr().err
        assert (folder / "run" / name).read_text() == "mine"
    assert train(folder, "--steps", "1", "--overwrite") == 0
    assert "overwrite" not in (folder / "run" / "config.toml").read_text()


def test_a_run_that_is_under_way_loses_nothing_to_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--steps", "4", "--save-every", "2") == 0
    files = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    capsys.readouterr()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True)"
    words = [sys.executable, "-c", f"{hold}; input()", str(tmp_path / "run" / "metrics.jsonl")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "\n"
        for flags in (["--overwrite"], ["--resume", "auto", "--steps", "8"], []):
            assert train(tmp_path, "--steps", "4", "--save-every", "2", *flags) == 2
            shown = capsys.readouterr()
            if flags:
                assert f"error: '{tmp_path}/run/metrics.jsonl': another run is writing to it; give" in shown.err
            assert shown.err.count("\n") == 1
        other.communicate("\n")
    assert files == {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    assert train(tmp_path, "--steps", "4", "--overwrite") == 0


def test_a_last_line_that_was_torn_is_made_again(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", "4", "--save-every", "2", "--lr-schedule", "constant") == 0
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_text()
    for harm in (whole[:-30], whole + '{"step": 5, "lo', whole + "\udcff\0"):
        path.write_text(harm, errors="surrogateescape")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004", ignore_errors=True)
        more = ["--save-every", "2", "--resume", "auto"]
        assert train(tmp_path, "--steps", "4", *more) == 0
        assert steps(tmp_path) == [1, 2, 3, 4]


RANKS = Path(__file__).with_name("soak_ranks.py")
SMALL = ["--model", "mlp", "--layers", "1", "--width", "8", "--batch", "4"]


def grown(steps: int, *flags: str) -> dict[str, float]:
    """A step leaves so much on a rank (in the thread world: on all of them), after the first half of a run."""
    command = [sys.executable, str(RANKS), str(steps), *SMALL, *flags]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    worst: dict[str, float] = {"blocks": 0, "heap": 0, "rss": 0}
    for line in done.stderr.splitlines():
        if line.startswith("[{"):
            seen = json.loads(line)
            half, last = seen[len(seen) // 2], seen[-1]
            for name in worst:
                worst[name] = max(worst[name], (last[name] - half[name]) / (last["step"] - half["step"]))
    print(worst)
    return worst


def test_a_step_leaves_no_object_behind() -> None:
    """Two threads; one dict of metrics a step would be a dozen blocks on each."""
    assert grown(2500, "--world", "thread", "--mesh", "shard=2", "--check-drift", "5")["blocks"] < 1


@pytest.mark.parametrize(
    "layout", ["--mesh shard=2 --strategy zero3", "--mesh replica=2 --strategy ddp", "--mesh pipe=2 --microbatches 2"]
)
@pytest.mark.parametrize("world", ["process", "thread"])
def test_five_thousand_steps(world: str, layout: str) -> None:
    words = layout.split() if "pipe" not in layout else [*layout.split(), "--layers", "2"]
    left = grown(5000, "--world", world, *words)
    assert left["blocks"] < 1 and left["heap"] < 20 and left["rss"] < 60, left
