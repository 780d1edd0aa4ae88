"""The rank's side, in this process: its entries, its signals and its leftovers."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_for

from plait.comm import Comm, ThreadWorld
from plait.comm.checks import group_of
from plait.comm.operation import Operation
from plait.run.watch.page import Page, Status
from plait.run.watch.processes import born, look
from plait.run.watch.rank import ASK_TO_END, RECENT, RankSide
from plait.table.collectives import Note
from plait.table.mesh import Mesh

OPERATION = Operation(
    "all_gather", group_of(Mesh(shard=3), 0, ("shard",)), Note("forward", "blocks.3", 1), 12, torch.float32
)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path, 3)


@pytest.fixture
def comm() -> Comm:
    return ThreadWorld(Mesh(shard=3)).comm(0)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLAIT_LAUNCHER", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def watch(comm: Comm, page: Page) -> Iterator[None]:
    side = RankSide(comm, page)
    try:
        yield
    finally:
        side.close()


def test_an_older_record_does_not_hide_a_step(comm: Comm, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins while another thread is writing the record."""
    with watch(comm, page):
        comm.begin_step(6)
        thread, name = threading.Thread(target=comm.begin_step, args=(7,)), socket.gethostname()

        def slow() -> str:
            if thread.ident is None:
                thread.start()
                thread.join(0.2)
            return name

        monkeypatch.setattr(socket, "gethostname", slow)
        wait_for(lambda: thread.ident is not None and not thread.is_alive())
        assert page.read(0).step == 7


def test_every_step_operation_and_wait_is_on_the_page(comm: Comm, page: Page) -> None:
    with watch(comm, page):
        read = page.read(0)
        assert (read.pid, read.state, read.step) == (os.getpid(), "starting", -1)
        begun = time.monotonic()
        comm.begin_step(4)
        assert page.read(0).step == 4
        wait_for(lambda: page.read(0).state == "running")
        comm.observers[0].asked(OPERATION)
        wait_for(lambda: page.read(0).operation == str(OPERATION))
        assert page.read(0).peers == [0, 1, 2]
        with comm.waiting(OPERATION):
            wait_for(lambda: page.read(0).state == "waiting")
        comm.begin_step(5)
        lasted = time.monotonic() - begun
        wait_for(lambda: page.read(0).finished == 1)
        ((computed, waited),) = page.read(0).steps
        assert waited > 0 and 0 < computed <= lasted - waited
    assert (page.read(0).state, comm.observers) == ("done", ())


def test_a_wait_that_fails_stays_on_the_page(comm: Comm, page: Page) -> None:
    with watch(comm, page):
        with pytest.raises(RuntimeError, match="gone"), comm.waiting(OPERATION):
            raise RuntimeError("a peer is gone")
        wait_for(lambda: (page.read(0).state, page.read(0).operation) == ("waiting", str(OPERATION)))


def test_the_last_steps_are_kept_oldest_first(comm: Comm, page: Page) -> None:
    with watch(comm, page):
        for step in range(RECENT + 5):
            comm.begin_step(step)
        wait_for(lambda: page.read(0).finished == RECENT + 4)
        assert len(page.read(0).steps) == RECENT


def test_it_lives_hears_the_launchers_wish_and_says_how_it_failed(comm: Comm, page: Page) -> None:
    def fails() -> None:
        with watch(comm, page):
            before = page.read(0).heartbeat
            wait_for(lambda: page.read(0).heartbeat > before)
            page.ask_to_stop(signal.SIGTERM)
            wait_for(lambda: comm.stop_signal == signal.SIGTERM)
            raise KeyError("a\nb")

    with pytest.raises(KeyError):
        fails()
    assert (page.read(0).state, page.read(0).error) == ("failed", "KeyError: 'a\\nb'")


def test_it_is_asked_for_its_stacks_and_writes_them_itself(comm: Comm, page: Page, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with watch(comm, page):
        os.kill(os.getpid(), signal.SIGUSR2)
        file = tmp_path / "stack-0.txt"
        wait_for(lambda: "test_it_is_asked_for_its_stacks" in file.read_text())
        assert "_beat" in file.read_text()
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize("number", ASK_TO_END)
def test_a_signal_asks_to_stop_and_the_users_handler_runs_too(number: signal.Signals, comm: Comm, page: Page) -> None:
    heard: list[int] = []
    users = signal.signal(number, lambda n, frame: heard.append(n))
    mine = signal.getsignal(number)
    try:
        with watch(comm, page):
            os.kill(os.getpid(), number)  # before the first step: the user's handler decides what becomes of it
            wait_for(lambda: comm.stop_signal == number)
            wait_for(lambda: heard == [number])
        assert signal.getsignal(number) is mine
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(number, users)


def test_signals_are_heard_behind_and_beside_others_who_listen(comm: Comm, page: Page) -> None:
    async def others() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, print)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: comm.stop_signal == signal.SIGUSR1)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGWINCH)  # and no listener is left

    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    try:
        with watch(comm, page):
            comm.begin_step(0)
            asyncio.run(others())
            for number in (signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
                wait_for(lambda number=number: comm.stop_signal == number)  # type: ignore[misc]
            signal.set_wakeup_fd(theirs.fileno())
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(-1)
        theirs.close()
        ours.close()


def run_in_fork(body: Callable[[], None]) -> int:
    """The exit code of a fork that runs ``body`` and then leaves with 0."""
    child = os.fork()
    if not child:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("step", "times", "goes_on"), [(-1, 1, 0), (3, 2, 0), (3, 1, 2)])
def test_a_signal_that_nobody_heeds_ends_the_process_as_always(
    step: int, times: int, goes_on: int, comm: Comm, page: Page
) -> None:
    def body() -> None:
        RankSide(comm, page)
        if step >= 0:
            comm.begin_step(step)
        for _ in range(times):
            comm.stop_signal = comm.stop_signal and int(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            if times > 1 or goes_on:
                wait_for(lambda: comm.stop_signal == signal.SIGTERM)
        for number in range(goes_on):
            comm.begin_step(step + 1 + number)
        time.sleep(30)

    assert run_in_fork(body) == -signal.SIGTERM
    assert page.read(0).signal == signal.SIGTERM


def test_a_forked_worker_has_its_own_signals(comm: Comm, page: Page) -> None:
    with watch(comm, page):
        comm.begin_step(0)
        assert run_in_fork(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
        time.sleep(0.1)
        assert comm.stop_signal == 0
        wait_for(lambda: page.read(0).state == "running")
        os.kill(os.getpid(), signal.SIGTERM)  # this process still hears its own
        wait_for(lambda: comm.stop_signal == signal.SIGTERM)


def test_without_a_launcher_it_is_gone_with_every_rank_and_the_folder(
    comm: Comm, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    launcher, other = start("sleep", "60"), start("sleep", "60")
    monkeypatch.setenv("PLAIT_LAUNCHER", str(launcher.pid))
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    page.write(Status(1, "h", other.pid, born=born(other.pid)))
    os.kill(other.pid, signal.SIGSTOP)

    def body() -> None:
        RankSide(comm, page)
        os.kill(launcher.pid, signal.SIGKILL)
        time.sleep(30)

    assert run_in_fork(body) == 1
    wait_for(lambda: look(other.pid).state == "gone")
    assert not tmp_path.exists()
    tmp_path.mkdir()
