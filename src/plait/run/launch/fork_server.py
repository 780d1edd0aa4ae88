"""Forks ranks from a process that has imported everything: each starts in milliseconds, the first time and again.

    launcher   ──►   fork server                     ──►   ranks
                     imports plait, computes nothing       run the command again

When the launcher dies, the kernel kills the server, and when the server dies, the ranks: even stopped ones, and without
running any of their code.  The launcher and its server exchange JSON messages over a pair of sockets.

The launcher itself cannot be copied: it may have threads and devices, and glibc reads its variables when a process
starts.
"""

import ctypes
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from plait.messages.escape import say
from plait.messages.wording import signal_name
from plait.run.launch.failure import leave, open_closed
from plait.run.launch.signals import ASKING
from plait.run.watch.processes import look, readable

LARGEST = 1 << 20
"""Largest message, in bytes."""

ANSWER_SECONDS = 120.0
"""Seconds that the launcher waits for an answer, unless the deadline is longer; the first comes after all imports."""

LATE = ("torch._dynamo", "tyro._backends._tyro_backend")
"""Modules that torch and tyro import at their first use, in a second or more."""

BETWEEN_SECONDS = 0.5
"""Seconds between two checks of a server that has not answered yet."""

NO_PROCESS = "no process can be started ({}): raise `ulimit -u` or the pids.max of the cgroup, or use fewer ranks"


RANKS_NEED = ("plait.comm.process", "plait.shared_memory.several_hosts", "plait.run.watch.rank")
"""Modules that every rank imports."""

PYTHON = (sys.executable, "-P")
"""Starts every process of plait: without -P, Python would look for modules in the current folder first."""

SERVER = "import sys; from plait.run.launch.fork_server import serve; serve(*map(int, sys.argv[1:3]), sys.argv[3:])"

PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""


class ForkServer:
    """The launcher's side of the fork server.

    Args:
        command: the words after ``python`` on the command line of a rank: ``-m module words...`` or ``script words...``
        environment: all variables of the ranks, except those that differ between them.
        deadline: seconds for which the server may be stopped.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], deadline: float = 60.0) -> None:
        self._deadline = deadline
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shared = [name for name in sys.modules if name.startswith("plait.") and name != "plait.__main__"]
        self._line.send(json.dumps(shared).encode())  # without the program, which each rank runs for itself
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # in the server too, until it ignores them
        try:
            words, end = [*PYTHON, "-c", SERVER, str(theirs.fileno()), str(os.getpid()), *command], theirs.fileno()
            self._process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, pass_fds=[end])
        except OSError as error:
            self._line.close()
            raise ValueError(NO_PROCESS.format(error.strerror)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._ended: dict[int, int] = {}
        self._runs = time.monotonic()

    def fork(self, variables: Mapping[str, str]) -> int:
        """Starts a rank with these variables as well; returns its process id.  ConnectionError if the server does not
        answer, or is gone, and its ranks with it; ValueError if this system starts no more processes."""
        with self._in_one_line():
            self._line.send(json.dumps(variables).encode())
            end = time.monotonic() + max(ANSWER_SECONDS, self._deadline)
            while True:
                while not readable([self._line.fileno()], BETWEEN_SECONDS):
                    self._check_it_runs(end)
                if "ended" not in (message := self._receive()):
                    break
        if "failed" in message:
            raise ValueError(NO_PROCESS.format(os.strerror(message["failed"])))
        return message["started"]

    def ended(self) -> Mapping[int, int]:
        """Returns the exit codes of the ranks that have ended, by process id; below 0: the signal that killed it.
        ConnectionError if the server is gone, or has been stopped for the deadline."""
        with self._in_one_line():
            while readable([self._line.fileno()], 0):
                self._receive()  # also the answer that an interrupted ``fork`` has not taken
            self._check_it_runs(math.inf)
        return self._ended

    def _check_it_runs(self, end: float) -> None:
        """Raises TimeoutError if a wait is past its end, or the server has been stopped for the deadline."""
        from plait.comm.deadline import awake_since  # with torch, which the launcher has by now

        now = time.monotonic()
        if look(self._process.pid).state != "stopped":
            self._runs = now
        if now > min(end, max(self._runs, awake_since()) + self._deadline):
            raise TimeoutError

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> dict[str, int]:
        """Returns the next message, and keeps its exit code if it has one."""
        data = self._line.recv(LARGEST)
        if not data:
            raise ConnectionResetError
        message: dict[str, int] = json.loads(data)
        if "ended" in message:
            self._ended[message["ended"]] = message["code"]
        return message

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        who = f"the process that forks the ranks (pid {self._process.pid})"
        try:
            yield
        except ConnectionError:
            code = self._process.wait()
            ended = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            raise ConnectionError(f"{who} {ended}; its ranks ended too") from None
        except TimeoutError:
            self._process.kill()
            raise ConnectionError(f"{who} is stopped, or does not answer: it is ended, with its ranks") from None


def die_with(parent: int) -> None:
    """Makes the kernel kill this process as soon as ``parent`` is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def serve(line_number: int, launcher: int, command: Sequence[str]) -> None:
    """Runs the server: starts a rank for each message, and sends a message for each rank that has ended."""
    die_with(launcher)
    open_closed()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ASKING}  # whole groups of processes get them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    line = socket.socket(fileno=line_number)
    for name in (*RANKS_NEED, *json.loads(line.recv(LARGEST))):
        importlib.import_module(name)  # every rank will need the modules of the launcher
    for name in LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    if command[0] != "-m":
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    own = os.getpid()
    while True:
        ready, _, _ = select.select([line.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            for process, code in _ended():
                line.send(json.dumps({"ended": process, "code": code}).encode())
        if line.fileno() in ready:
            request = line.recv(LARGEST)
            if not request:
                os._exit(0)
            try:
                process = os.fork()
            except OSError as error:
                line.send(json.dumps({"failed": error.errno}).encode())
                continue
            if not process:
                signal.set_wakeup_fd(-1)
                for number, handler in before.items():
                    signal.signal(number, handler)
                line.close()
                _be_a_rank(command, json.loads(request), own)
            line.send(json.dumps({"started": process}).encode())


def _ended() -> list[tuple[int, int]]:
    """Returns (process id, exit code) of the ranks that have ended since the last call."""
    found: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return found


def _be_a_rank(command: Sequence[str], variables: Mapping[str, str], server: int) -> NoReturn:
    """Runs the command, as ``python`` would, and ends this process: without an interpreter's slow end."""
    code: object = 1
    try:
        die_with(server)
        if numpy := sys.modules.get("numpy"):  # torch's is the same in every process, Python's another in every fork
            numpy.random.seed()
        os.environ.update(variables)
        is_module = command[0] == "-m"
        sys.argv = list(command[is_module:])
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code or 0
        if not isinstance(code, int):
            say(f"{code}\n")
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code if isinstance(code, int) else 1)
