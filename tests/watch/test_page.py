"""The status page, its private folder, and processes as the kernel tells of them: nothing on a page is trusted."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from plait.comm import ThreadWorld
from plait.run.watch.joined import shared_folder, watch_joined
from plait.run.watch.page import SLOT, WATCH, Page, Status
from plait.run.watch.processes import ProcessState, born, launcher, look, out_of_memory_kills, started
from plait.run.watch.rank import RECENT
from plait.table.mesh import Mesh


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def place_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"plait-ranks-{os.getuid()}-{name}"


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_what_may_be_another_ones_is_refused(what: str, tmp_path: Path) -> None:
    folder = place_of("x")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if what == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif what == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("")
    with pytest.raises(ValueError, match=r"is not a folder of user \d+ with mode 700: .* set TMPDIR"):
        shared_folder("x")


def test_one_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    with pytest.raises(ValueError, match=rf"is not a folder of user {user} with mode 700"):
        shared_folder("x")


def test_a_page_that_cannot_be_used_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comm = ThreadWorld(Mesh(shard=2)).comm(1)
    monkeypatch.setenv(WATCH, str(tmp_path / "nowhere\x1b[2J"))
    watch_joined(comm)
    shown = capsys.readouterr().err
    assert shown.startswith("plait: rank 1 runs without a status page: ")
    assert "\x1b" not in shown
    assert comm.observers == ()


def test_a_launchers_page_is_used_and_left_to_it(tmp_path: Path, monkeypatch: Any) -> None:
    comm = ThreadWorld(Mesh(shard=2)).comm(1)
    page = Page(tmp_path, 2)
    monkeypatch.setenv(WATCH, str(tmp_path))
    watch_joined(comm)
    assert (page.read(1).pid, page.read(1).state) == (os.getpid(), "starting")
    comm.close()
    assert page.read(1).state == "done"
    assert tmp_path.exists()


WAITS = Status(1, "host a", 4711, "waiting", 7, "all_gather", 5.5, 6.5, [[1.0, 0.25]], 1, [0, 1, 2], 12)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    page = Page(tmp_path, 3)
    page.write(WAITS)
    assert Page(tmp_path, 3).read_all() == [Status(0), WAITS, Status(2)]
    page.begins(1, 8)
    assert page.read(1) == replace(WAITS, step=8)
    assert not page.failed
    page.write(Status(2, "host a", 4712, "failed", error="ValueError: no"))
    assert page.failed and page.read(2).error == "ValueError: no"


def test_a_reader_never_sees_two_records_in_one(tmp_path: Path) -> None:
    page, end, seen = Page(tmp_path, 1), time.monotonic() + 0.5, set[str]()
    writer, step = os.fork(), 0
    while not writer:
        step += 1
        page.write(Status(0, pid=1, finished=step, operation="abcdefgh"[step % 8] * 200))
    try:
        while time.monotonic() < end or len(seen) < 2:
            if (read := page.read(0)).pid:
                seen.add(read.operation)
                assert read.operation == "abcdefgh"[read.finished % 8] * 200
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


@pytest.mark.parametrize("text", ["", "{", "[" * 9999, "null", '{"rank": 0}', '"state": "dancing"', '"pid": null'])
def test_noise_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    page, good = Page(tmp_path, 2), json.dumps(vars(WAITS))
    for wrong in ('"state": "waiting"', '"pid": 4711'):
        written = good.replace(wrong, text) if text.startswith('"') else text
        monkeypatch.setattr(json, "dumps", lambda given, written=written: written)
        page.write(WAITS)
    assert page.read(1) == Status(1)


def test_half_a_record_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    page, draw = Page(tmp_path, 2), random.Random(3)
    for _ in range(3):
        page.write(WAITS)
        page.write(replace(WAITS, operation="another"))
        start = SLOT * (3 + page._slot) + 8 + draw.randrange(100)
        page._memory[start : start + 99] = draw.randbytes(99)
        assert page.read(1) == WAITS


def test_a_long_record_is_cut_and_read(tmp_path: Path) -> None:
    page, steps = Page(tmp_path, 1), [[123.456789, 123.456789]] * RECENT
    page.write(Status(0, "h" * 64, 2**31, operation="é" * 999, steps=steps, peers=list(range(999)), error="\x1b" * 999))
    read = page.read(0)
    assert (len(read.operation), len(read.error), len(read.peers), read.steps) == (200, 300, 63, steps)


def test_without_its_folder_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Page(tmp_path / "gone", 1)
    (folder := tmp_path / "folder").mkdir()
    page = Page(folder, 1)
    assert os.listdir(folder) == ["page"]
    shutil.rmtree(folder)
    page.write(Status(0, state="failed"))
    assert page.failed


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def becomes(pid: int, wanted: ProcessState) -> None:
    wait_for(lambda: look(pid) == wanted, 30, lambda: str(look(pid)))


def test_a_process_runs_is_stopped_and_is_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        becomes(process.pid, ProcessState(process.pid, "running"))
        assert look(process.pid, born(process.pid) + 1).state == "gone"  # the id is another one's now
        process.send_signal(signal.SIGSTOP)
        becomes(process.pid, ProcessState(process.pid, "stopped"))
        process.kill()
        becomes(process.pid, ProcessState(process.pid, "gone", -signal.SIGKILL))  # it has not been reaped yet
        process.wait()
        assert look(process.pid) == ProcessState(process.pid, "gone")
        assert born(process.pid) == 0


def test_without_a_descriptor_for_it_a_process_is_not_called_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        _, most = before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
        try:
            seen = look(process.pid, 12345)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        process.kill()
    assert seen.state == "running"


def test_its_exit_code_is_read_and_a_name_with_parentheses_too(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "exit 3"]) as process:
        becomes(process.pid, ProcessState(process.pid, "gone", 3))
    (tmp_path / "7").mkdir()
    fields = ["0"] * 50
    fields[0], fields[19] = "T", "99"
    (tmp_path / "7" / "stat").write_text(f"7 (a) Z (b) {' '.join(fields)}")
    assert look(7, 99, tmp_path) == ProcessState(7, "stopped")


def test_the_launcher_is_known_by_its_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLAIT_LAUNCHER", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launcher() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher() == (os.getppid(), born(os.getppid()))
    assert 0 <= time.time() - started(os.getpid()) < 24 * 3600
    environment = {"TORCHELASTIC_RUN_ID": "none", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "60"], env=environment) as wrapper:  # a shell around the rank, say
        wait_for(Path(f"/proc/{wrapper.pid}/environ").read_bytes)  # for a moment after exec there is nothing
        monkeypatch.setattr(os, "getppid", lambda: wrapper.pid)
        assert launcher() == (os.getpid(), born(os.getpid()))
        wrapper.kill()
    for unseen in (0, 2**22 + 1):  # of another namespace; above the largest process id
        monkeypatch.setattr(os, "getppid", lambda pid=unseen: pid)
        assert launcher() is None


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "kills"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/b/memory.events", "low 0\noom 2\noom_kill 1\noom_group_kill 0\n", 1),
        ("0::/\n", "sys/fs/cgroup/memory.events", "oom 2\noom_kill 4\n", 4),
        ("0::/a\n", "sys/fs/cgroup/memory.events", "oom 2\noom_kill 4\n", 4),
        ("0::/a\n", "elsewhere", "oom_kill 9\n", 0),
    ],
)
def test_memory_ran_out_only_where_the_kernel_says_so(
    tmp_path: Path, cgroup: str, file: str, text: str, kills: int
) -> None:
    for name, content in (("proc/self/cgroup", cgroup), (file, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert out_of_memory_kills(tmp_path) == kills
