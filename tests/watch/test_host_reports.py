"""Two hosts, played by two pages and one store: reports of their ranks, and hosts that fall silent."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from waiting import wait_for

from plait.comm.process_identity import Peer
from plait.run.watch import host_reports
from plait.run.watch.diagnose import LONG
from plait.run.watch.host_reports import SILENT, HostBoard, HostReports, report_of
from plait.run.watch.joined import LATER, Neighbours
from plait.run.watch.page import Page, State, Status
from plait.run.watch.processes import ProcessState
from plait.table.mesh import Mesh

PEERS = [Peer(0, "a", 1), Peer(1, "a", 2), Peer(2, "b", 3), Peer(3, "b", 4)]
TWO = [Peer(0, "a", os.getpid()), Peer(1, "b", 3)]
"""One rank on each host."""


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def never_stopped() -> float:
    return 0.0


def seen(rank: int, process: ProcessState | None = None, **more: Any) -> tuple[Status, ProcessState]:
    given: dict[str, Any] = {"operation": "all_reduce", "since": 40.0, "heartbeat": 49.0, "state": "waiting"} | more
    return Status(rank, "b", 10 + rank, step=7, **given), process or ProcessState(10 + rank, "running")


def test_times_of_another_host_become_times_of_this_one() -> None:
    board = HostBoard(PEERS, Clock(), never_stopped)
    gone = ProcessState(13, "gone", -9)
    board.take("b", report_of([seen(2), seen(3, gone)], 50.0, 1))
    (two, runs), (three, ended) = board.seen()
    assert (two.rank, two.since, two.heartbeat, two.step, two.operation) == (2, 90.0, 99.0, 7, "all_reduce")
    assert (three.host, three.pid, ended, runs.state) == ("b", 13, gone, "running")


def test_a_silent_host_is_named_with_its_ranks_and_what_they_did_last() -> None:
    clock = Clock()
    board = HostBoard([*PEERS, Peer(4, "c", 5), Peer(5, "d", 6)], clock, never_stopped)
    board.take("b", first := report_of([seen(2), seen(3)], 50.0, 1))
    board.take("d", report_of([seen(5, state="done")], 50.0, 1, leaves=True))
    clock.now += SILENT
    assert not board.lost()
    clock.now += 1
    board.take("b", first)  # the store still has it
    lost = board.lost()
    assert [*lost] == ["b", "c"], "host d has left"
    assert lost["b"].splitlines() == [
        "host b (ranks 2, 3) was last heard 6.0 s ago",
        "  rank 2: was waiting in step 7, all_reduce",
        "  rank 3: was waiting in step 7, all_reduce",
    ]
    assert not board.seen()
    board.take("b", report_of([], 50.0, 2))
    assert [*board.lost()] == ["c"]


@pytest.mark.parametrize("why", ["this host was stopped", "it left"])
def test_a_host_is_not_called_silent_where(why: str) -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock, lambda: 105.0 if "stopped" in why else 0.0)
    board.take("b", report_of([seen(2), seen(3)], 50.0, 1, leaves="left" in why))
    clock.now += SILENT + 1
    assert not board.lost() and bool(board.seen()) == ("stopped" in why)
    clock.now += SILENT
    assert bool(board.lost()) == ("stopped" in why)


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x80\x04cos\nsystem\n.", b"", b"null", b"{}", b"[" * 100_000, b'{"beat": 1e999, "leaves": 1}'),
        report_of([seen(1)], 50.0, 1),
        report_of([seen(2, steps=[[1.0]])], 50.0, 1),
        report_of([seen(2, state="dancing")], 50.0, 1),
        report_of([seen(2, peers=["0"])], 50.0, 1),
        report_of([seen(2, ProcessState(1, "b"))], 50.0, 1),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_report_is_refused(data: str | bytes) -> None:
    board = HostBoard(PEERS, Clock(), never_stopped)
    with pytest.raises(ConnectionError):
        board.take("b", data)
    assert not board.seen()


def test_text_of_another_host_is_escaped() -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock, never_stopped)
    board.take("b", report_of([seen(2, operation="\x1b[2J\nplait: all is well")], 50.0, 1))
    clock.now += SILENT + 1
    assert "\\x1b[2J\\nplait" in board.lost()["b"]


@pytest.fixture
def neighbours(tmp_path: Path) -> Neighbours:
    """Rank 0 is alone on its host; rank 1 is on host b."""
    comm: Any = SimpleNamespace(rank=0, mesh=Mesh(shard=2))
    made = Neighbours(comm, Page(tmp_path, 2))
    made.hosts = SimpleNamespace(board=HostBoard(TWO), look=lambda: None, speak_now=lambda: None)  # type: ignore[assignment]
    return made


def hears(neighbours: Neighbours, theirs: Status, process: ProcessState | None = None) -> None:
    board, process = neighbours.hosts.board, process or ProcessState(13, "running")  # type: ignore[union-attr]
    assert board is not None
    board.take("b", report_of([(theirs, process)], time.monotonic(), time.monotonic_ns()))


def test_a_rank_that_its_own_host_cannot_accuse_is_found_by_rank_0(neighbours: Neighbours) -> None:
    """On its own host no other rank waits for the one that stands still."""
    mine = Status(0, "a", os.getpid(), "waiting", 7, operation="all_reduce", peers=[0, 1])
    theirs = Status(1, "b", 13, "running", 7)

    def accused(waited: float, stood: float) -> list[tuple[str, int]]:
        now = time.monotonic()
        hears(neighbours, replace(theirs, since=now - stood, heartbeat=now))
        near = [(replace(mine, since=now - waited), ProcessState(os.getpid(), "running"))]
        return [(f.kind, f.rank) for f in neighbours._diagnosed(near, now)]

    assert accused(LONG + 1, LONG + 1) == [], "the report may be old"
    assert accused(LONG + LATER + 1, LONG + LATER + 1) == [("stands still", 1)]
    assert accused(LONG + LATER + 1, 1.0) == [], "it has gone on"


def test_steps_of_another_host_are_compared(neighbours: Neighbours) -> None:
    now = time.monotonic()
    fast = Status(0, "a", os.getpid(), "running", 40, steps=[[0.2, 0.2]] * 40, finished=40, since=now)
    hears(neighbours, Status(1, "b", 13, "running", 40, steps=[[0.4, 0.0]] * 40, finished=39, since=now))
    (one,) = neighbours._diagnosed([(fast, ProcessState(os.getpid(), "running"))], now)
    assert (one.kind, one.rank) == ("straggler", 1) and "2.0 times as long" in one.what


def test_a_rank_that_was_killed_on_another_host_is_told_once(
    neighbours: Neighbours, capsys: pytest.CaptureFixture[str]
) -> None:
    neighbours.page.write(Status(0, "a", os.getpid(), "running", 7, since=time.monotonic()))
    hears(neighbours, Status(1, "b", 13, "running", 7), ProcessState(13, "gone", -9))
    for _ in range(2):
        neighbours._looked = 0.0
        neighbours.look(lambda: None)
    assert capsys.readouterr().err.count("plait: rank 1 was killed by SIGKILL\n") == 1


@pytest.mark.parametrize(("state", "why"), [("done", "left before the others"), ("running", "was killed by SIGKILL")])
def test_ranks_that_end_together_say_why_once(
    state: State, why: str, tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have written that they failed before either has reported, and before the end of a killed rank is known."""
    (folder := tmp_path / "ranks").mkdir()
    page, now, both = Page(folder, 3), time.monotonic(), list[Neighbours]()
    page.write(
        Status(1, "a", 1 << 30 if state == "done" else start("sh", "-c", "sleep 1; kill -9 $$").pid, state, since=now)
    )
    for rank in (0, 2):
        page.write(Status(rank, "a", os.getpid(), "failed", since=now, peers=[0, 1, 2], error="ConnectionError: gone"))
        comm: Any = SimpleNamespace(rank=rank, mesh=Mesh(shard=3))
        both.append(Neighbours(comm, Page(folder, 3)))
    for one in both:
        one.last_look(failed=True)
    assert capsys.readouterr().err.count(f"plait: rank 1 {why}\n") == 1
    assert not folder.exists()


def test_while_the_store_is_silent_no_host_is_heard_again() -> None:
    told = list[str]()
    reports = HostReports(dist.HashStore(), PEERS, 0, list, told.append)  # type: ignore[attr-defined]
    reports.close()
    reports._told, reports._answered = {"b"}, reports._answered - SILENT - 1
    reports.look()
    assert len(told) == 1 and told[0].startswith("plait: the store on the host of rank 0 has not been reached")


class Silent:
    """A store that answers no request any more once ``cut`` is set, and then raises or waits as torch's does."""

    def __init__(self, store: Any) -> None:
        self._store, self.cut, self.refused = store, "", 0

    def clone(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if self.cut == "broken":
            self.refused += 1
            raise dist.DistNetworkError("the connection is closed")
        while self.cut:
            time.sleep(0.01)
        return getattr(self._store, name)


def test_two_hosts_tell_each_other_and_each_notices_the_other_ones_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reports, "EVERY", 0.01)
    monkeypatch.setattr(host_reports, "SILENT", 0.5)
    monkeypatch.setattr(host_reports, "LEAVE_SECONDS", 0.1)
    store, told = dist.HashStore(), {"a": list[str](), "b": list[str]()}  # type: ignore[attr-defined]
    ranks = [seen(2), seen(3)]
    line = Silent(store)
    first = HostReports(store, PEERS, 0, list, told["a"].append)
    second = HostReports(line, PEERS, 2, lambda: ranks, told["b"].append)
    third = HostReports(store, PEERS, 3, lambda: ranks, told["b"].append)
    board = first.board
    assert board is not None

    def looked(text: str, host: str) -> Callable[[], bool]:
        return lambda: bool(first.look() or second.look() or any(text in said for said in told[host]))  # type: ignore[func-returns-value]

    wait_for(lambda: [(s.rank, s.host, s.pid) for s, _ in board.seen()] == [(2, "b", 12), (3, "b", 13)])
    line.cut = "broken"
    wait_for(lambda: line.refused > 1)
    answered = second._answered
    wait_for(lambda: line.refused > 3)
    assert second._answered == answered, "an error is no answer"
    line.cut = "cut"
    wait_for(looked("plait: host b (ranks 2, 3) was last heard ", "a"))
    wait_for(looked("plait: the store on the host of rank 0 has not been reached from host b for ", "b"))
    ranks[1] = seen(3, ProcessState(13, "gone", -9))
    third.speak_now()  # from a rank that is not the lowest
    wait_for(lambda: board.seen() and board.seen()[1][1].exit_code == -9)
    second.speak_now()  # in its heartbeat thread, or in front of its end
    line.cut = ""
    wait_for(looked("plait: host b is heard again\n", "a"))
    wait_for(looked("plait: host of rank 0 is heard again\n", "b"))
    second.close()
    wait_for(lambda: board._reports["b"].leaves)
    store.set("report of b", b"\x80\x04cos\nsystem\n.\x1b[2J")
    time.sleep(0.1)
    assert first._thread.is_alive() and not any("\x1b" in said for said in told["a"])
    first.close()
