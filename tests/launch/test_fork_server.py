"""The process that ranks are copies of: its few imports, and the report when it is gone or stopped."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.run.launch import fork_server
from plait.run.launch.fork_server import ForkServer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

Serve = Callable[..., tuple[ForkServer, int]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A server that runs this code in place of its own; its process id."""
    servers = []

    def serve(code: str, deadline: float = 60.0) -> tuple[ForkServer, int]:
        monkeypatch.setattr(fork_server, "SERVER", code)
        server = ForkServer([], os.environ, deadline)
        servers.append(server)
        return server, server._process.pid

    yield serve
    for server in servers:
        server.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_line_says_that_it_is_gone(serve: Serve, number: signal.Signals) -> None:
    server, pid = serve(f"import os; os.kill(os.getpid(), {int(number)}); import time; time.sleep(1); os._exit(3)")
    what = "ended with code 3" if number == signal.SIGTERM else "was killed by SIGKILL"
    for _ in range(2):
        with pytest.raises(ConnectionError, match=rf"forks the ranks \(pid {pid}\) {what}; its ranks ended too"):
            while True:
                server.ended()


@pytest.mark.parametrize(("ask", "stops"), [("fork", False), ("fork", True), ("ended", True)])
def test_one_that_does_not_answer_or_is_stopped_is_ended_at_the_deadline(
    ask: str, stops: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2 if not stops else 100)
    server, pid = serve("import time; time.sleep(100)", deadline=0.5)
    assert server.ended() == {}
    if stops:
        os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"\(pid {pid}\) is stopped, or does not answer"):
        while time.monotonic() < start + 30:
            server.fork({}) if ask == "fork" else server.ended()
            time.sleep(0.01)
    assert time.monotonic() > start + 0.4


ANSWERS = """
import json, os, socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
line.recv(1 << 20)
for answer in {answers}:
    line.recv(1 << 20)
    line.send(json.dumps(answer).encode())
"""


def test_an_answer_is_waited_for_as_long_as_the_deadline_allows(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.1)
    server, _ = serve(f"import time; time.sleep(1); {ANSWERS.format(answers=[{'started': 7}])}".replace("; \n", "\n"))
    assert server.fork({}) == 7


def test_an_answer_that_a_signal_kept_from_being_read_is_no_end_of_a_rank(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the second of several ranks is forked: the first is still to be ended."""
    ends = """line.send(b'{"ended": 6, "code": -9}'); line.recv(1)"""
    server, _ = serve(ANSWERS.format(answers=[{"started": 7}]) + ends)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(fork_server, "readable", lambda *_: sys.exit(130))  # as the handler of the signal does
        server.fork({})
    while server.ended() != {6: -9}:
        time.sleep(0.01)


def test_a_process_that_cannot_be_started_is_one_line(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"no process can be started \(Resource temporarily unavailable\): raise `ulimit -u`"
    server, _ = serve(ANSWERS.format(answers=[{"failed": errno.EAGAIN}]))
    with pytest.raises(ValueError, match=says):
        server.fork({})

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(ValueError, match=says):
        ForkServer([], os.environ)


SCRIPT = """
import os, sys
import numpy, torch
os.write(1, f"{os.environ['RANK']} {numpy.random.random()} {torch.rand(1).item()}\\n".encode())
sys.exit("the matter is here" if os.environ["RANK"] == "1" else 0)
"""

RUN = """
from plait.run.launch.fork_server import ForkServer; import os, sys, time
server = ForkServer(sys.argv[1:], os.environ)
pids = [server.fork({"RANK": str(rank)}) for rank in range(2)]
while len(server.ended()) < 2: time.sleep(0.02)
print("codes", *(server.ended()[pid] for pid in pids)); server.close()
"""


def test_each_rank_draws_its_own_numbers_and_what_it_leaves_with_is_said(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-c", RUN, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    zero, one, codes = (line.split()[1:] for line in sorted(done.stdout.splitlines()))
    assert zero[0] != one[0], done
    assert zero[1] == one[1], "as in processes of their own"
    assert done.stderr == "the matter is here\n" and codes == ["0", "1"], done.stderr
