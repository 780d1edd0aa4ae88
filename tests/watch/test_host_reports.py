"""Two hosts, played by two pages and one store: reports of their ranks, and hosts that fall silent."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from plait.comm.process_identity import Peer
from plait.run.watch import host_reports
from plait.run.watch.diagnose import LONG, Diagnosis, block
from plait.run.watch.host_reports import NOT_A_REPORT, SILENT, HostBoard, HostReports, report_of
from plait.run.watch.joined import LATER, Neighbours
from plait.run.watch.page import Page, Status, StatusRecord
from plait.run.watch.processes import ProcessState
from plait.table.mesh import Mesh

PEERS = [Peer(0, "a", 1), Peer(1, "a", 2), Peer(2, "b", 3), Peer(3, "b", 4)]
TWO = [Peer(0, "a", os.getpid()), Peer(1, "b", 3)]
"""One rank on each host."""
PATIENCE = 60


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def never_stopped() -> float:
    return 0.0


def status(rank: int, **more: Any) -> Status:
    given: dict[str, Any] = {"operation": "all_reduce", "since": 40.0, "heartbeat": 49.0} | more
    return Status(rank, "b", 10 + rank, "waiting", 7, **given)


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_times_of_another_host_become_times_of_this_one() -> None:
    board = HostBoard(PEERS, Clock(), awake=never_stopped)
    board.take("b", report_of([status(2), status(3)], 50.0, 1))
    two, three = board.statuses()
    assert (two.rank, two.since, two.heartbeat, two.step, two.operation) == (2, 90.0, 99.0, 7, "all_reduce")
    assert three.host == "b" and three.pid == 13


def test_a_silent_host_is_named_with_its_ranks_and_what_they_did_last() -> None:
    clock = Clock()
    board = HostBoard([*PEERS, Peer(4, "c", 5), Peer(5, "d", 6)], clock, awake=never_stopped)
    board.take("b", first := report_of([status(2), status(3)], 50.0, 1))
    board.take("d", report_of([Status(5, "d", 6, "done")], 50.0, 1))
    clock.now += SILENT
    assert not board.lost()
    clock.now += 1
    board.take("b", first)  # the store still has it
    silent, never_came = board.lost()  # not host d, whose ranks are done
    assert never_came.host == "c"
    assert str(silent).splitlines() == [
        "host b (ranks 2, 3) was last heard 6.0 s ago",
        "  rank 2: was waiting in step 7, all_reduce",
        "  rank 3: was waiting in step 7, all_reduce",
    ]
    assert not board.statuses()
    board.take("b", report_of([], 50.0, 2))
    assert [lost.host for lost in board.lost()] == ["c"]


def test_a_host_is_not_silent_while_this_one_is_stopped() -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock, awake=lambda: 1000.0)
    board.take("b", report_of([status(2), status(3)], 50.0, 1))
    clock.now = 1000.0 + SILENT
    assert not board.lost() and board.statuses()
    clock.now += 1
    assert board.lost() and not board.statuses()


def test_a_host_that_leaves_is_not_waited_for() -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock, awake=never_stopped)
    board.take("b", report_of([status(2), status(3)], 50.0, 1, leaves=True))
    clock.now += SILENT + 1
    assert not board.lost()


def found(*rows: Any, host: str = "b", text: str = "x") -> bytes:
    return json.dumps({"host": host, "text": text, "found": rows}).encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x80\x04cos\nsystem\n.", b"", b"null", b"{}", b"[" * 100_000, b'{"beat": 1e999, "leaves": 1}'),
        *(b'{"beat": 1, "leaves": 0, "ranks": [{"rank": 0}]}', b'{"beat": 1, "leaves": 0, "ranks": {"rank": 2}}'),
        *(report_of([status(1)], 50.0, 1), report_of([Status(2, "b", 1, "dancing")], 50.0, 1)),
    ],
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    board = HostBoard(PEERS, Clock(), awake=never_stopped)
    with pytest.raises(NOT_A_REPORT):
        board.take("b", data)
    assert not board.statuses()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", found(2), found(["dancing", 2, 1]), found(["stopped", 1, 1]), found([["stopped"], 2, 1])),
        *(found(["stopped", 2, 1], host="z"), found(["stopped", 2, 1], host="a")),
    ],
)
def test_nothing_is_found_of_a_rank_that_is_not_theirs(data: bytes) -> None:
    shown = list[str]()
    board = HostBoard(PEERS, Clock(), shown.append, never_stopped)
    with pytest.raises(NOT_A_REPORT):
        board.take_found(data)
    assert not shown and not board.found


def test_text_of_another_host_is_escaped() -> None:
    shown = list[str]()
    board = HostBoard(PEERS, Clock(), shown.append, never_stopped)
    board.take("b", report_of([status(2, phase="\x1b[2J", error="a\nb")], 50.0, 1))
    [two] = board.statuses()
    assert two.phase == "\\x1b[2J" and two.error == "a\\nb"
    board.take_found(found(["stopped", 3, 7], text="plait: \x1b[2J\nmore"))
    assert shown == ["plait: \\x1b[2J\nmore\n"]


def test_what_another_host_has_told_is_not_told_again() -> None:
    board = HostBoard(PEERS, Clock(), lambda text: None, never_stopped)
    board.take_found(found(["stopped", 3, 7]))
    stopped = Diagnosis("stopped", 3, "is stopped", "on host b", step=7)
    assert board.has_told(stopped) and board.has_told(replace(stopped, kind="stands still"))
    assert not board.has_told(replace(stopped, step=8)) and not board.has_told(replace(stopped, rank=2))
    assert not board.has_told(replace(stopped, kind="straggler"))


@pytest.fixture
def neighbours(tmp_path: Path) -> Neighbours:
    """Those of rank 0, which is alone on its host; rank 1 is on host b."""
    comm: Any = SimpleNamespace(rank=0, mesh=Mesh(shard=2))
    made = Neighbours(comm, Page.create(tmp_path / "page", 2), tmp_path, -1)
    made.hosts = SimpleNamespace(board=HostBoard(TWO, tell=lambda text: None))  # type: ignore[assignment]
    return made


def test_a_rank_that_its_own_host_cannot_accuse_is_found_by_rank_0(neighbours: Neighbours) -> None:
    """On its own host no other rank waits for the one that stands still."""
    board, beats = neighbours.hosts.board, iter(range(1, 9))  # type: ignore[union-attr]
    assert board is not None
    mine = Status(0, "a", os.getpid(), "waiting", 7, operation="all_reduce", peers=(0, 1))
    theirs = Status(1, "b", 13, "running", 7)

    def accused(waited: float, stood: float) -> list[tuple[str, int]]:
        now = time.monotonic()
        board.take("b", report_of([replace(theirs, since=now - stood, heartbeat=now)], now, next(beats)))
        state = [ProcessState(os.getpid(), "running")]
        return [(f.kind, f.rank) for f in neighbours._diagnosed([replace(mine, since=now - waited)], state, now)]

    assert accused(LONG + 1, LONG + 1) == [], "its own host may still say more of it"
    assert accused(LONG + LATER + 1, LONG + LATER + 1) == [("stands still", 1)]
    assert accused(LONG + LATER + 1, 1.0) == [], "it has gone on"
    board.take_found(found(["stands still", 1, 7]))
    assert accused(LONG + LATER + 1, LONG + LATER + 1) == [], "its own host has told it"


def test_steps_of_another_host_are_compared(neighbours: Neighbours) -> None:
    now = time.monotonic()
    fast = Status(0, "a", os.getpid(), "running", 40, steps=((0.2, 0.2),) * 40, finished=40, since=now)
    slow = Status(1, "b", 13, "running", 40, steps=((0.4, 0.0),) * 40, finished=39, since=now)
    neighbours.hosts.board.take("b", report_of([slow], now, 1))  # type: ignore[union-attr]
    (one,) = neighbours._diagnosed([fast], [ProcessState(os.getpid(), "running")], now)
    assert (one.kind, one.rank) == ("straggler", 1) and "2.0 times as long" in one.what


def test_while_the_store_is_silent_no_host_is_heard_again(tmp_path: Path) -> None:
    told = list[str]()
    reports = HostReports(dist.HashStore(), PEERS, 0, Page.create(tmp_path / "page", 4), told.append)  # type: ignore[attr-defined]
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


def test_two_hosts_tell_each_other_and_each_notices_the_other_ones_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_reports, "EVERY", 0.01)
    monkeypatch.setattr(host_reports, "SILENT", 0.5)
    monkeypatch.setattr(host_reports, "LEAVE_SECONDS", 0.1)
    store, pages, told = dist.HashStore(), {}, {"a": list[str](), "b": list[str]()}  # type: ignore[attr-defined]
    for host in "ab":
        (tmp_path / host).mkdir()
        pages[host] = Page.create(tmp_path / host / "page", 4)
    StatusRecord(pages["b"], 2, "b", 77, 1).beats()
    StatusRecord(pages["b"], 3, "b", 78, 1).beats()
    line = Silent(store)
    first = HostReports(store, PEERS, 0, pages["a"], told["a"].append)
    second = HostReports(line, PEERS, 2, pages["b"], told["b"].append)
    third = HostReports(store, PEERS, 3, pages["b"], told["b"].append)
    board = first.board
    assert board is not None

    def looked(text: str, host: str) -> Callable[[], bool]:
        return lambda: bool(first.look() or second.look() or any(text in said for said in told[host]))  # type: ignore[func-returns-value]

    until(lambda: len(board.statuses()) == 2)
    assert [(s.rank, s.host, s.pid) for s in board.statuses()] == [(2, "b", 77), (3, "b", 78)]
    stopped = Diagnosis("stopped", 2, "is stopped", "on host b", step=7)
    third.send_found(block([stopped]), [stopped])  # from the rank that saw it, which is not the lowest
    first.send_found("of its own", [stopped])
    until(lambda: told["a"])
    assert told["a"] == ["plait: rank 2 is stopped\n  on host b\n"] and board.has_told(stopped)
    line.cut = "broken"
    until(lambda: line.refused > 1)
    answered = second._answered
    until(lambda: line.refused > 3)
    assert second._answered == answered, "an error is no answer"
    line.cut = "cut"
    until(looked("plait: host b (ranks 2, 3) was last heard ", "a"))
    until(looked("plait: the store on the host of rank 0 has not been reached from host b for ", "b"))
    second.send_found("plait: comes late", [stopped])  # in its heartbeat thread, or in front of its end
    line.cut = ""
    until(looked("plait: host b is heard again\n", "a"))
    until(looked("plait: host of rank 0 is heard again\n", "b"))
    until(lambda: "plait: comes late\n" in told["a"])
    store.queue_push("found", b"\x80\x04cos\nsystem\n.\x1b[2J")
    until(lambda: "no host of this run wrote" in told["a"][-1])
    assert "\x1b" not in told["a"][-1]
    second.close()
    until(lambda: board._left == {"b"})
    first.close()
