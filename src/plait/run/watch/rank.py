"""The rank's side: it writes its state on the page, shows that it lives, and obeys requests.

    main thread                             heartbeat thread, every 0.25 s and when something happens
    asks, waits, goes on ──► fields here    the fields, its heartbeat ──► the page (a new step goes there at once)
    a signal's handler: hardly more than    the page's wish, a signal to this process ──► comm.stop_signal
      the user's handler                    the launcher is gone ──► ends every rank of this host

A signal reaches the heartbeat thread by Python's wakeup descriptor, also while the main thread is inside torch.
SIGUSR2 writes the stacks of all threads into ``stack-<rank>.txt`` from within C, so a rank that makes no progress
shows where it is.

SIGTERM, SIGUSR1 and SIGHUP ask the run to end after a step (``StepResult.stop``).  They still end this process if that
is impossible: before its first step, the second time, when other ranks are gone, and when the program makes another
step although the ranks have agreed to stop.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from plait.comm.base import Comm
from plait.comm.deadline import clock
from plait.comm.observer import Observer
from plait.comm.operation import Operation
from plait.messages.escape import one_line, say
from plait.run.watch import processes, stacks
from plait.run.watch.page import Page, State, Status
from plait.run.watch.processes import readable

if TYPE_CHECKING:
    from plait.run.watch.joined import Neighbours

BEAT = 0.25
"""Seconds between two heartbeats."""

ASK_TO_END = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

RECENT = 256
"""The number of steps whose times are kept."""


class RankSide(Observer):
    """Observes one rank for the page of its host, from construction to ``close``; ``neighbours`` watches the others, if
    no launcher does."""

    def __init__(self, comm: Comm, page: Page, neighbours: Neighbours | None = None) -> None:
        self.comm, self.page, self.neighbours = comm, page, neighbours
        self._pid, self._launcher = os.getpid(), processes.launcher()
        self._born, self._signal, self._error = processes.born(self._pid), 0, ""
        self._now: tuple[State, Operation | None, float] = "starting", None, time.monotonic()
        """The state, the last operation, and their start: one tuple, because another thread reads it."""
        self.step, self._finished, self._began, self._waited = -1, 0, 0.0, 0.0
        self._steps, self._lock = deque[list[float]](maxlen=RECENT), threading.RLock()
        self._signals = _Signals()
        self._stop_at: tuple[int, int] | None = None  # a signal that would have ended this process, and its step
        self._stacks = stacks.listen(page.folder, comm.rank)
        self._closing = False
        self._write()
        comm.observers += (self,)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._beat, name="plait heartbeat", daemon=True)
        self._thread.start()

    def begin_step(self, number: int) -> None:
        now, first = time.perf_counter(), self.step < 0
        with self._lock:
            if not first:
                self._steps.append([round(now - self._began - self._waited, 6), round(self._waited, 6)])
                self._finished += 1
            self._began, self._waited, self.step = now, 0.0, number
            self._now = "running", self._now[1], time.monotonic()
            self.page.begins(self.comm.rank, number)
        if self.neighbours is not None and first:
            self.neighbours.at_once = True  # all ranks have written on the page: the next look finds them
            self._signals.wake()
        if self._stop_at is not None and number > self._stop_at[1] + 1:  # it should have stopped, but goes on
            self._obey(self._stop_at[0])

    def asked(self, operation: Operation) -> None:
        self._now = "running", operation, time.monotonic()

    def waits(self, operation: Operation) -> None:
        self._now = "waiting", operation, time.monotonic()

    def waited(self, operation: Operation, start: float, end: float) -> None:
        self._waited += end - start
        self._now = "running", operation, time.monotonic()

    def closed(self) -> None:
        self.close()

    def _write(self) -> None:
        with self._lock:  # until it is written: an older record would hide a newer one
            state, operation, since = self._now
            steps, finished, step = list(self._steps), self._finished, self.step
            text, peers = ("", []) if operation is None else (str(operation), list(operation.group.ranks))
            who = {"rank": self.comm.rank, "host": socket.gethostname(), "pid": self._pid, "born": self._born}
            now = {"state": state, "since": since, "heartbeat": time.monotonic(), "step": step}
            about = {"operation": text, "peers": peers, "steps": steps, "finished": finished}
            self.page.write(Status(**who, **now, **about, signal=self._signal, error=self._error))  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the watch; the record says how this rank left.  A second call, or one in a fork, does nothing."""
        if self._closing or os.getpid() != self._pid:
            return
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        self._error = _line(error) if failed else ""
        self._now = "failed" if failed else "done", self._now[1], time.monotonic()
        self._write()
        self._closing = True
        self._signals.wake()
        self._thread.join(10)
        if self.neighbours is not None:
            self.neighbours.last_look(failed=failed)
        atexit.unregister(self.close)
        self.comm.observers = tuple(o for o in self.comm.observers if o is not self)
        self._signals.close()
        stacks.hush(self._stacks, self.page.folder, self.comm.rank)

    def _beat(self) -> None:
        while not self._closing:
            readable([self._signals.descriptor, *(self.neighbours.descriptors() if self.neighbours else [])], BEAT)
            self._write()
            clock()
            if self._launcher is not None and processes.look(*self._launcher).state == "gone":
                self._end_all()
            if self.page.stop and not self.comm.stop_signal:
                self.comm.stop_signal = self.page.stop
            if self.neighbours is not None:
                self.neighbours.look(self._write)
            for number in self._signals.take():
                self._hear(number)

    def _hear(self, number: int) -> None:
        again = self.comm.stop_signal == number
        self.comm.stop_signal = number
        if number in self._signals.ending:
            died = self.neighbours is not None and self.neighbours.ended
            if again or died or self.step < 0:
                self._obey(number)
            self._stop_at = number, self.step

    def _obey(self, number: int) -> None:
        """Ends this process as the signal does by default."""
        self._signal = number
        self._write()
        if self.neighbours is not None:
            with contextlib.suppress(OSError):  # the other thread may be looking
                self.neighbours.last_look(failed=False)
        self._signals.obey(number)

    def _end_all(self) -> None:
        """Ends all ranks of this host, stopped ones too, and removes the folder, because the launcher is gone."""
        assert self._launcher is not None
        for other in self.page.read_all():
            if other.pid not in (0, self._pid) and processes.look(other.pid, other.born).state != "gone":
                with contextlib.suppress(OSError):
                    os.kill(other.pid, signal.SIGKILL)
        shutil.rmtree(self.page.folder, ignore_errors=True)
        say(f"plait: the launcher (pid {self._launcher[0]}) is gone: rank {self.comm.rank} ends\n")
        os._exit(1)


class _Signals:
    """Signals that ask to end, for the heartbeat thread; Python hears them in the main thread only."""

    def __init__(self) -> None:
        self._awake, self._write = socket.socketpair()
        self._awake.setblocking(False)
        self._write.setblocking(False)
        self.descriptor = self._awake.fileno()
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        if threading.current_thread() is not threading.main_thread():
            return
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in ASK_TO_END:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self.close)  # a worker of a data loader has its own

    @property
    def ending(self) -> set[int]:
        return {number for number, before in self._before.items() if before == signal.SIG_DFL}

    def take(self) -> list[int]:
        """The numbers of the signals that came, except those that other code has handled since."""
        try:
            came = self._awake.recv(4096)
        except OSError:
            return []
        if self._wakeup >= 0:  # other code, asyncio perhaps, listened before
            with contextlib.suppress(OSError):
                os.write(self._wakeup, came.replace(b"\0", b""))
        return [n for n in came if n in self._before and signal.getsignal(n) == self._handle]

    def wake(self) -> None:
        """Ends a wait for the descriptor."""
        self._write.send(b"\0")

    def obey(self, number: int) -> None:
        """Ends this process as the signal does by default, from any thread."""
        sys.stderr.flush()
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)

    def close(self) -> None:
        if self._write.fileno() >= 0 and threading.current_thread() is threading.main_thread():
            now = signal.set_wakeup_fd(-1)
            with contextlib.suppress(ValueError, OSError):  # the earlier listener has closed it
                signal.set_wakeup_fd(self._wakeup if now == self._write.fileno() else now)
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
        self._before = {}
        self._awake.close()
        self._write.close()

    def _handle(self, number: int, frame: Any) -> None:
        now = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        if now != self._write.fileno():  # asyncio, perhaps, took the descriptor away, and may be gone
            with contextlib.suppress(BlockingIOError):
                self._write.send(bytes([number]))
            if now >= 0:
                signal.set_wakeup_fd(now)
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


def _line(error: BaseException | None) -> str:
    return one_line(f"{type(error).__name__}: {error}".splitlines()[0])
