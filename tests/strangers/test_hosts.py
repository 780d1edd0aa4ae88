"""Two hosts, played by two pages and a channel on loopback: what their ranks do, and who falls silent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.comm.peer import Peer
from plait.run.watch.channel import Listener, Message, Sender
from plait.run.watch.diagnose import LONG, Diagnosis, block
from plait.run.watch.hosts import SILENT, HostBoard, HostChannel, HostSide, parse_address, report_of
from plait.run.watch.joined import LATER, Neighbours
from plait.run.watch.key import ChannelKey
from plait.run.watch.page import Page, Status, StatusRecord
from plait.run.watch.processes import ProcessState
from plait.table.mesh import Mesh

PEERS = [Peer(0, "a", 1), Peer(1, "a", 2), Peer(2, "b", 3), Peer(3, "b", 4)]
KEY = ChannelKey(b"sixteen bytes or more")


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Muted(Sender):
    """One that can fall silent without a word."""

    muted = False

    def send(self, message: Message) -> None:
        if not self.muted:
            super().send(message)


def status(rank: int, **more: Any) -> Status:
    return Status(rank, "b", 10 + rank, "waiting", 7, operation="all_reduce", since=40.0, heartbeat=49.0, **more)


def test_times_of_another_host_become_times_of_this_one() -> None:
    board = HostBoard(PEERS, Clock())
    for message in report_of("b", [status(2), status(3)], now=50.0):
        board.take(message)
    two, three = board.statuses()
    assert (two.rank, two.since, two.heartbeat, two.step, two.operation) == (2, 90.0, 99.0, 7, "all_reduce")
    assert three.host == "b" and three.pid == 13


def test_a_silent_host_is_named_with_its_ranks_and_what_they_did_last() -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock)
    board.take(report_of("b", [status(2), status(3)], now=50.0)[0])
    clock.now += SILENT
    assert not board.lost()
    clock.now += 1
    [lost] = board.lost()
    assert str(lost).splitlines() == [
        "host b (ranks 2, 3) was last heard 6.0 s ago",
        "  rank 2: was waiting in step 7, all_reduce",
        "  rank 3: was waiting in step 7, all_reduce",
    ]
    board.take(report_of("b", [], now=50.0)[0])
    assert not board.lost()


def test_a_host_is_not_silent_while_this_one_is_stopped() -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock, awake=lambda: 1000.0)
    board.take(report_of("b", [status(2), status(3)], now=50.0)[0])
    clock.now = 1000.0 + SILENT
    assert not board.lost() and board.statuses()
    clock.now += 1
    assert board.lost() and not board.statuses()


def test_a_host_that_never_came_is_named_too_and_one_that_is_done_is_not() -> None:
    clock = Clock()
    board = HostBoard([*PEERS, Peer(4, "c", 5)], clock)
    board.take(report_of("b", [Status(2, "b", 1, "done"), Status(3, "b", 1, "done")], 50.0)[0])
    clock.now += SILENT + 1
    assert [lost.host for lost in board.lost()] == ["c"]


def test_a_host_that_leaves_is_not_waited_for_until_it_comes_again() -> None:
    clock = Clock()
    board = HostBoard(PEERS, clock)
    board.take(report_of("b", [status(2), status(3)], 50.0, leaves=True)[0])
    clock.now += SILENT + 1
    assert not board.lost()
    board.take(report_of("b", [status(2), status(3)], 50.0)[0])
    clock.now += SILENT + 1
    assert [lost.host for lost in board.lost()] == ["b"]


@pytest.mark.parametrize("end", ["side.closed()", "raise SystemExit(0)"])
def test_a_program_that_ends_says_that_it_leaves(end: str, tmp_path: Path) -> None:
    told = list[Message]()
    with Listener(("127.0.0.1", 0), KEY, told.append) as listener:
        script = f"""
from pathlib import Path
from plait.comm.peer import Peer
from plait.table.mesh import Mesh
from plait.run.watch.channel import Sender
from plait.run.watch.hosts import HostSide
from plait.run.watch.key import ChannelKey
from plait.run.watch.page import Page
sender = Sender({listener.address!r}, ChannelKey({KEY.secret!r}))
page, peers = Page.create(Path({str(tmp_path / "page")!r}), 4), [Peer(0, "a", 1), Peer(2, "b", 3)]
side = HostSide(peers, 2, page, sender, None, print)
{end}
"""
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
        until = time.monotonic() + 30
        while not (told and told[-1]["leaves"]) and time.monotonic() < until:
            time.sleep(0.02)
    assert told[-1] == {"host": "b", "ranks": [], "leaves": True}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"host": "z", "ranks": []},
        {"host": "b", "ranks": [{"rank": 0}]},
        {"host": ["b"], "ranks": []},
        {"host": "b", "ranks": {"rank": 2}},
        report_of("b", [status(1)], 50.0)[0],
        report_of("b", [Status(2, "b", 1, "dancing")], 50.0)[0],
    ],
)
def test_what_is_no_report_is_refused(message: dict[str, Any]) -> None:
    board = HostBoard(PEERS)
    with pytest.raises(ValueError, match=r"no report|no other|has no|never"):
        board.take(message)
    assert not board.statuses()


def test_text_of_another_host_is_escaped() -> None:
    board = HostBoard(PEERS)
    board.take(report_of("b", [status(2, phase="\x1b[2J", error="a\nb")], 50.0)[0])
    [two] = board.statuses()
    assert two.phase == "\\x1b[2J" and two.error == "a\\nb"


def _place(folder: Path) -> tuple[Page, Path, int]:
    """A page of two ranks, its folder, and no lock."""
    return Page.create(folder / "page", 2), folder, -1


def told_by_b(board: HostBoard, *found: Diagnosis) -> None:
    """What host b sends when it finds something, without the channel."""
    sent = list[Message]()
    with Listener(("127.0.0.1", 0), KEY, sent.append) as listener:
        HostChannel(listener.address, KEY, tuple(PEERS), "b").send_home(block(found), found)
        HostChannel(listener.address, KEY, tuple(PEERS), "a").send_home("of its own", found)
        end = time.monotonic() + 30
        while not sent and time.monotonic() < end:
            time.sleep(0.01)
    for message in sent:
        board.take(message)


def test_what_another_host_finds_is_told_here_and_escaped() -> None:
    shown = list[str]()
    board = HostBoard(PEERS, Clock(), shown.append)
    stopped = Diagnosis("stopped", 3, "is stopped\x1b[2J", "on host b", step=7)
    told_by_b(board, stopped)
    assert shown == ["plait: rank 3 is stopped\\x1b[2J\n  on host b\n"]
    assert board.has_told(stopped) and board.has_told(replace(stopped, kind="stands still"))
    assert not board.has_told(replace(stopped, step=8)) and not board.has_told(replace(stopped, rank=2))
    assert not board.has_told(replace(stopped, kind="straggler"))
    assert not board.lost()


@pytest.mark.parametrize("found", [[["dancing", 2, 1]], [["stopped", 1, 1]], [[["stopped"], 2, 1]], [2]])
def test_nothing_is_found_of_a_rank_that_is_not_theirs(found: Any) -> None:
    shown = list[str]()
    board = HostBoard(PEERS, Clock(), shown.append)
    with pytest.raises(ValueError, match=r"no report|has no|nothing that is found"):
        board.take({"host": "b", "ranks": [], "text": "a", "found": found})
    assert not shown and not board.found


def test_a_rank_that_its_own_host_cannot_accuse_is_found_by_rank_0(tmp_path: Path) -> None:
    """One rank on each host: on its own host nobody waits for the one that stands still."""
    peers = [Peer(0, "a", os.getpid()), Peer(1, "b", 3)]
    shown = list[str]()
    neighbours = Neighbours(SimpleNamespace(rank=0, mesh=Mesh(shard=2)), *_place(tmp_path))  # type: ignore[arg-type]
    neighbours.board = HostBoard(peers, time.monotonic, shown.append)
    mine = Status(0, "a", os.getpid(), "waiting", 7, operation="all_reduce", peers=(0, 1))
    theirs = Status(1, "b", 13, "running", 7)

    def found(waited: float, stood: float) -> list[tuple[str, int]]:
        now = time.monotonic()
        neighbours.board.take(report_of("b", [replace(theirs, since=now - stood, heartbeat=now)], now)[0])  # type: ignore[union-attr]
        state = [ProcessState(os.getpid(), "running")]
        return [(f.kind, f.rank) for f in neighbours._diagnosed([replace(mine, since=now - waited)], state, now)]

    assert found(LONG + 1, LONG + 1) == [], "its own host may still say more of it"
    assert found(LONG + LATER + 1, LONG + LATER + 1) == [("stands still", 1)]
    assert found(LONG + LATER + 1, 1.0) == [], "it has gone on"
    told_by_b(neighbours.board, Diagnosis("stands still", 1, "has stood still", "on host b", step=7))
    assert found(LONG + LATER + 1, LONG + LATER + 1) == [], "its own host has told it"
    neighbours.board._heard["b"] -= SILENT + 1
    assert neighbours.board.statuses() == [], "of a host that is not heard nothing is known"


def test_steps_of_another_host_are_compared(tmp_path: Path) -> None:
    peers = [Peer(0, "a", os.getpid()), Peer(1, "b", 3)]
    neighbours = Neighbours(SimpleNamespace(rank=0, mesh=Mesh(shard=2)), *_place(tmp_path))  # type: ignore[arg-type]
    neighbours.board, now = HostBoard(peers), time.monotonic()
    fast = Status(0, "a", os.getpid(), "running", 40, steps=((0.2, 0.2),) * 40, finished=40, since=now)
    slow = Status(1, "b", 13, "running", 40, steps=((0.4, 0.0),) * 40, finished=39, since=now)
    neighbours.board.take(report_of("b", [slow], now)[0])
    (one,) = neighbours._diagnosed([fast], [ProcessState(os.getpid(), "running")], now)
    assert (one.kind, one.rank) == ("straggler", 1) and "2.0 times as long" in one.what


def test_many_ranks_go_in_several_messages() -> None:
    assert [len(m["ranks"]) for m in report_of("b", [status(r) for r in range(10)], 0.0)] == [4, 4, 2]


def test_the_longest_that_ranks_can_say_gets_through() -> None:
    """The page cuts their texts by bytes, what is told is cut by characters, and JSON escapes them."""
    heard, wide = list[Message](), "\U0001f600" * 400
    full = replace(status(2), phase=wide[:300], operation=wide[:300], error=wide[:300], peers=tuple(range(63)))
    full = replace(full, steps=((123456.123456, 123456.123456),) * 500, finished=10**9, count=10**12, pid=10**7)
    found = [Diagnosis("stands still", 2, wide, wide, others=(wide,) * 64, stack=wide * 100, step=10**9)] * 64
    with Listener(("127.0.0.1", 0), KEY, heard.append) as listener, Sender(listener.address, KEY) as sender:
        sent = report_of("b", [full] * 8, 0.0)
        for message in sent:
            sender.send(message)
        HostChannel(listener.address, KEY, tuple(PEERS), "b").send_home(block(found), found)
        end = time.monotonic() + 30
        while len(heard) < len(sent) + 1 and time.monotonic() < end:
            time.sleep(0.01)
    assert len(heard) == len(sent) + 1 and heard[-1]["text"]


def test_two_hosts_over_the_channel(tmp_path: Path) -> None:
    pages = {}
    for host in "ab":
        (tmp_path / host).mkdir()
        pages[host] = Page.create(tmp_path / host / "page", 4)
    StatusRecord(pages["b"], 2, "b", 77, 1).beats()
    StatusRecord(pages["b"], 3, "b", 78, 1).beats()
    board, told = HostBoard(PEERS), {"a": list[str](), "b": list[str]()}
    listener = Listener(("127.0.0.1", 0), KEY, board.take)
    first = HostSide(PEERS, 0, pages["a"], listener, board, told["a"].append)
    sender = Muted(listener.address, KEY)
    second = HostSide(PEERS, 2, pages["b"], sender, None, told["b"].append)
    end = time.monotonic() + 30
    while len(board.statuses()) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert [(s.rank, s.host, s.pid) for s in board.statuses()] == [(2, "b", 77), (3, "b", 78)]
    sender.muted = True  # the host falls silent, without having said that it leaves
    silent = time.monotonic()
    while not told["a"] and time.monotonic() < silent + 30:
        time.sleep(0.05)
    assert told["a"][0].startswith("plait: host b (ranks 2, 3) was last heard ")
    third = HostSide(PEERS, 2, pages["b"], Sender(listener.address, KEY), None, told["b"].append)
    while len(told["a"]) < 2 and time.monotonic() < silent + 60:
        time.sleep(0.05)
    assert told["a"][1] == "plait: host b is heard again\n"
    first.closed()  # the host of rank 0 is gone: the other one says so
    gone = time.monotonic()
    while not told["b"] and time.monotonic() < gone + 30:
        time.sleep(0.05)
    assert told["b"][0].startswith("plait: the host of rank 0 has not been reached from host b for ")
    third.closed()
    second.closed()


def test_where_it_listens_is_host_and_port() -> None:
    assert parse_address("10.0.0.5:29600") == ("10.0.0.5", 29600)
    assert parse_address("[fd00::1]:29600") == ("fd00::1", 29600)
    for wrong in ("", "a", "a:", ":1", "a:b", "a:0", "a:70000", "\x1b[2J"):
        with pytest.raises(ValueError, match="PLAIT_CHANNEL="):
            parse_address(wrong)
