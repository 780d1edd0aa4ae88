"""The process of which ranks are copies: what it is spared, and what is said when it is gone or stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.launch import fork_server
from plait.launch.fork_server import ForkServer

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
    code = 3 if number == signal.SIGTERM else -9
    for _ in range(2):
        with pytest.raises(ConnectionError, match=rf"copies \(pid {pid}\) ended with code {code}, and its ranks too"):
            server.fork({})
    with pytest.raises(ConnectionError, match="ended with code"):
        server.ended()


def test_one_that_does_not_answer_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    server, pid = serve("import time; time.sleep(100)")
    with pytest.raises(ConnectionError, match=rf"\(pid {pid}\) is stopped, or does not answer"):
        server.fork({})


def test_one_that_is_stopped_for_the_deadline_is_ended(serve: Serve) -> None:
    server, pid = serve("import time; time.sleep(100)", deadline=0.5)
    assert server.ended() == {}
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="is stopped"):
        while time.monotonic() < start + 30:
            server.ended()
            time.sleep(0.01)
    assert time.monotonic() > start + 0.4


SCRIPT = """
import os, sys
import numpy, torch
if sys.argv[1] == "text":
    sys.exit("the matter is here" if os.environ["RANK"] == "1" else 0)
os.write(1, f"{os.environ['RANK']} {numpy.random.random()} {torch.rand(1).item()}\\n".encode())
"""


def run_ranks(script: Path, word: str) -> Any:
    """What two ranks write, and how they end."""
    words = "from plait.launch.fork_server import ForkServer; import os, sys, time\n"
    words += "server = ForkServer(sys.argv[1:], os.environ)\n"
    words += "pids = [server.fork({'RANK': str(rank)}) for rank in range(2)]\n"
    words += "while len(server.ended()) < 2: time.sleep(0.02)\n"
    words += "print([server.ended()[pid] for pid in pids]); server.close()"
    command = [sys.executable, "-c", words, str(script), word]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def test_what_a_rank_leaves_with_is_said(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_ranks(tmp_path / "script.py", "text")
    assert done.stderr == "the matter is here\n" and done.stdout == "[0, 1]\n", done.stderr


def test_each_rank_draws_its_own_numbers_from_numpy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_ranks(tmp_path / "script.py", "draw")
    drawn = [line.split()[1:] for line in sorted(done.stdout.splitlines())[:2]]
    assert drawn[0][0] != drawn[1][0], done
    assert drawn[0][1] == drawn[1][1], "as in processes of their own"
