"""``plait submit``: the text is shown, checked, and given to the user's own client."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from plait.run.commands.main import main
from plait.run.launch.render import TARGETS

TRAIN = ("train", "--mesh", "replica=2 shard=2")
SIZES = ("--hosts", "2", "--ranks-per-host", "2")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of clients that note their words, and the text of their file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    note = "import json, pathlib, sys\nfiles = [p for p in sys.argv[1:] if p[0] == '/']\n"
    note += "path = pathlib.Path(files[0].removesuffix(':job'))\n"
    note += "path = path / 'plait_launch.py' if path.is_dir() else path\n"
    note += f"found = sorted(p.name for p in path.parent.rglob('*'))\npathlib.Path({str(tmp_path / 'note')!r})"
    note += ".write_text(json.dumps([sys.argv[1:], path.read_text(), found]))\nsys.exit(3)\n"
    for target in TARGETS.values():
        (folder / target.client[0]).write_text(f"#!{sys.executable}\n{note}")
        (folder / target.client[0]).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "note"


@pytest.mark.parametrize("target", TARGETS)
def test_a_client_gets_the_text_that_was_shown(target: str, clients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--gpu", "H100", "--image", "me/plait:1") if target == "modal" else ()
    words = ("submit", target, *SIZES, *more, "--option=--user=a b", "--", *TRAIN)
    assert main(words) == 3
    shown = capsys.readouterr()
    given, text, _ = json.loads(clients.read_text())
    assert shown.out == text and "replica=2 shard=2" in text
    command = shlex.split(shown.err.removeprefix("plait: "))
    assert [word.replace("FOLDER", "") for word in command] == [TARGETS[target].client[0], *map(_without_folder, given)]
    own = [*TARGETS[target].client[1:], "--user=a b"]
    assert given[: len(own)] == own


def _without_folder(word: str) -> str:
    """A word that names the temporary folder, or a file in it, without that folder."""
    return re.sub(r"^/.*plait-submit-[^/]*/?", "", word)


def test_a_dry_run_only_shows(clients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("submit", "slurm", "--dry-run", *SIZES, "--option=-p a b", "--", *TRAIN)) == 0
    shown = capsys.readouterr()
    assert "srun python -m plait train --mesh 'replica=2 shard=2'\n" in shown.out
    assert shown.err == "plait: sbatch '-p a b' job.sh\n"
    assert not clients.exists()


def test_ray_gets_the_files_beside_the_program(clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.txt").write_text("x")
    for name in ("train.py", "job.py"):
        (tmp_path / name).write_text("")
    files = ("--files", "data", "--files", "train.py", "--files", "job.py")
    assert main(("submit", "ray", "--memory", "2", *files, "--", "train.py", "--lr", "$(id) '\n'")) == 3
    given, text, found = json.loads(clients.read_text())
    assert f"'memory': {2 << 30}" in text
    assert found == ["corpus.txt", "data", "job.py", "plait_launch.py", "train.py"]
    assert given[:3] == ["job", "submit", "--working-dir"] and given[4:] == ["--", "python", "plait_launch.py"]


def test_a_client_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(("submit", "kubernetes", "--", "x.py")) == 2
    assert "kubectl is not installed here" in capsys.readouterr().err
