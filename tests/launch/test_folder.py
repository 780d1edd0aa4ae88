"""The private folder goes with its launcher; what a killed one left, the next one removes."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from plait.launch.folder import PREFIX, private_folder, sweep


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_the_user_may_enter_and_nothing_is_left(own_place: Path) -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "store").write_text("x")
        sweep()  # of another launch, while this one runs
        assert (folder / "store").exists()
    assert list(own_place.iterdir()) == []


def test_what_a_killed_launcher_left_is_removed_and_nothing_else(own_place: Path) -> None:
    left = own_place / f"{PREFIX}123-abc"
    left.mkdir()
    (left / "store").write_text("x")
    file, others, link = own_place / f"{PREFIX}file", own_place / "plait-of-the-user", own_place / f"{PREFIX}link"
    file.write_text("x")
    others.mkdir()
    link.symlink_to(others)
    with private_folder():
        assert {path.name for path in own_place.iterdir()} >= {file.name, others.name, link.name}
        assert not left.exists()


def test_the_kernel_takes_the_lock_from_one_that_is_killed(own_place: Path) -> None:
    script = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "import importlib.util as u\n"
        "spec = u.spec_from_file_location('folder', sys.argv[2])\n"
        "m = u.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "with m.private_folder() as f: print(f, flush=True); sys.stdin.read()"
    )
    source = str(Path(sys.modules["plait.launch.folder"].__file__ or ""))
    words = [sys.executable, "-c", script, str(own_place), source]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        sweep()
        assert folder.exists()
        owner.kill()
        owner.wait(60)
    sweep()
    assert not folder.exists()
