"""Processes, as the kernel tells of them."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_for

from plait.run.watch.processes import ProcessState, born, launcher, look, out_of_memory_kills, started

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
        wait_for(Path(f"/proc/{wrapper.pid}/environ").read_bytes)  # for a moment behind exec there is nothing
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
