"""Two hosts, played by two pages and a channel on loopback: what their ranks do, and who falls silent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plait.comm.peer import Peer
from plait.watch.channel import Listener, Message, Sender
from plait.watch.hosts import SILENT, HostBoard, HostSide, parse_address, report_of
from plait.watch.key import ChannelKey
from plait.watch.page import Page, Status, StatusRecord

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
from plait.watch.channel import Sender
from plait.watch.hosts import HostSide
from plait.watch.key import ChannelKey
from plait.watch.page import Page
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


def test_many_ranks_go_in_several_messages() -> None:
    assert [len(m["ranks"]) for m in report_of("b", [status(r) for r in range(40)], 0.0)] == [16, 16, 8]


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
