"""The ranks of a world, met in one store: each here is a thread, the store a dict of torch's."""

import contextlib
import errno
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from waiting import wait_for

import plait
from plait.comm import ProcessComm, store_rendezvous
from plait.comm.deadline import clock
from plait.comm.environment import WorldVariables
from plait.comm.init_process import file_store, meet_ranks, open_store
from plait.comm.process_identity import Peer
from plait.comm.store_rendezvous import Met, meet

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def met(peers: list[Peer], sizes: list[int] | int, seconds: float = 30, store: Any = None) -> list[Met | Exception]:
    """The meeting of each peer, or its error."""
    store = store or dist.HashStore()  # type: ignore[attr-defined]
    sizes = sizes if isinstance(sizes, list) else [sizes] * len(peers)

    def one(peer: Peer, size: int) -> Met | Exception:
        try:
            return meet(store, peer, size, clock() + seconds)
        except (ValueError, OSError) as error:
            return error

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(one, peers, sizes))


def peer(rank: int, host: str = "a", pid: int = 0, restarts: int = 0, **facts: str) -> Peer:
    pid = pid or 100 + rank
    return Peer(rank, host, pid, facts, restarts, token=f"{host} {pid}")


def test_all_come_and_know_each_other_and_a_second_world_of_theirs_is_no_restart() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for _ in range(3):
        for outcome in met([peer(2, "b"), peer(0), peer(1, "b")], 3, store=store):
            assert isinstance(outcome, Met) and not outcome.attempt
            assert [(p.rank, p.host, p.pid) for p in outcome.peers] == [(0, "a", 100), (1, "b", 101), (2, "b", 102)]


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 1)])
def test_ranks_that_are_started_again_meet_whatever_their_launchers_count(counts: tuple[int, int]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second = met([peer(0), peer(1, "b")], 2, store=store)
    assert isinstance(first, Met) and isinstance(second, Met) and first.attempt == second.attempt == 0
    again = [peer(1, "a", 7, restarts=counts[0]), peer(0, "b", 8, restarts=counts[1])]  # ranks change places
    for outcome in met(again, 2, store=store):
        assert isinstance(outcome, Met) and [p.pid for p in outcome.peers] == [8, 7] and outcome.attempt == 1


def claimed(store: Any, *peers: Peer) -> Any:
    """A world in which these have come, without a roll yet."""
    part = dist.PrefixStore("plait/world 1", store)  # type: ignore[attr-defined]
    for one in peers:
        part.set(f"here/{one.rank}", one.text)
    store.add("plait/worlds", 1)
    store.set("plait/current", "1")
    return part


def test_a_world_whose_ranks_were_ended_while_they_came_is_left_by_those_who_wait() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    part = claimed(store, peer(0, "a", 5), peer(1, "b", 6))
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(met, [peer(1, "b", 7)], 2, 30, store)
        wait_for(lambda: b"b 7" in part.get("here/1"))
        [opened] = pool.submit(met, [peer(0, "a", 8)], 2, 30, store).result()
        [moved] = waiting.result()
    assert isinstance(opened, Met) and isinstance(moved, Met) and [p.pid for p in moved.peers] == [8, 7]
    assert opened.attempt == moved.attempt == 1


def test_who_differs_and_in_what_is_known_to_all() -> None:
    outcomes = met([peer(0, mesh="shard=3"), peer(1, mesh="shard=3"), peer(2, mesh="pipe=3", torch="1")], 3)
    for outcome in outcomes:
        assert isinstance(outcome, ValueError)
        assert "mesh is shard=3 on ranks 0, 1, pipe=3 on rank 2; torch is not there on ranks 0, 1, 1 on rank 2" in str(
            outcome
        )
        assert "rank 2 (host a, process 102)" in str(outcome)


def test_another_number_of_ranks_is_told_to_all() -> None:
    peers = [peer(0, size="3"), peer(1, size="3"), peer(2, size="4"), peer(3, size="4")]
    zero, one, two, three = met(peers, [3, 3, 4, 4])
    for outcome in (zero, one, two):
        assert isinstance(outcome, ValueError) and "size is 3 on ranks 0, 1, 4 on rank 2. Start" in str(outcome)
    assert isinstance(three, ValueError) and "size is 3 on ranks 0, 1, 4 on ranks 2, 3. Start" in str(three)


def test_ranks_that_differ_do_not_wait_for_those_that_never_come() -> None:
    for outcome in met([peer(0, size="4"), peer(1, size="2")], [4, 2], seconds=600):
        assert isinstance(outcome, ValueError) and "size is 4 on rank 0, 2 on rank 1" in str(outcome)


def test_rank_0_stays_until_the_others_know_why_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their store may end with it."""
    monkeypatch.setattr(store_rendezvous, "READ_SECONDS", 30.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(met, [peer(0, mesh="pipe=2")], 2, 30, store)
        pool.submit(met, [peer(1)], 2, 30, store)
        [outcome] = first.result()
        assert isinstance(outcome, ValueError) and store.check(["plait/world 1/read/1"])


def test_two_jobs_in_one_store_do_not_meet(tmp_path: Path) -> None:
    def one(job: str, rank: int) -> Met:
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "PLAIT_STORE": str(tmp_path / "store")}
        place = WorldVariables.read(given | {"TORCHELASTIC_RUN_ID": job})
        return meet_ranks(place, 30, {"job": job})

    with ThreadPoolExecutor(4) as pool:
        assert all(isinstance(outcome, Met) for outcome in pool.map(one, "abab", (0, 0, 1, 1)))


def test_who_has_no_place_in_a_world_does_not_enter_it() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    part = claimed(store, peer(0), peer(1, "b"))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(met, [peer(1, "c")], 2, 2, store)
        wait_for(lambda: b'"c"' in part.get("here/1"))
        part.set("roll", json.dumps({"peers": [peer(0).text, peer(1, "b").text]}))  # before the holder looked
        [outcome] = second.result()
    assert isinstance(outcome, TimeoutError)
    told = "rank 0 did not come, and rank 1 (host b, process 101) has the place of rank 1 (host c, process 101)"
    assert told in str(outcome)


@pytest.mark.parametrize("others", [[peer(0, "b"), peer(0, "c")], [peer(0), peer(1, "b"), peer(1, "c")]])
def test_two_processes_of_one_rank_are_named_at_once(others: list[Peer]) -> None:
    said = [str(outcome) for outcome in met(others, 3, seconds=2)]
    (refused,) = (text for text in said if "did not come" not in text)
    assert all(str(one) in refused for one in others[-2:]) and "have the same rank: give each" in refused


def test_who_does_not_come_is_named_and_nobody_waits_longer() -> None:
    for outcome in met([peer(0), peer(3)], 4, seconds=2):
        assert isinstance(outcome, TimeoutError) and "for 4 ranks: ranks 1, 2 did not come" in str(outcome)
    [alone] = met([peer(1)], 3, seconds=0.1)
    assert isinstance(alone, TimeoutError) and "for 3 ranks: rank 0 did not come" in str(alone)


@pytest.mark.parametrize(
    "said",
    [
        b"\x80\x04cos\nsystem\n.",
        b"[" * 60_000,
        b"{}",
        b'{"rank": "0", "host": 3, "pid": null}',
        b"\x1b[2J",
        b"null",
        json.dumps({"rank": 1, "host": "h", "pid": 1, "facts": {"a": 3}, "restarts": 0, "token": ""}).encode(),
    ],
)
def test_what_a_stranger_wrote_in_the_store_is_refused_and_shown_escaped(said: bytes) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("plait/world 1/here/1", said)
    [outcome] = met([peer(0)], 2, seconds=1, store=store)
    assert isinstance(outcome, ConnectionError) and "\x1b" not in str(outcome)
    other = dist.HashStore()  # type: ignore[attr-defined]
    other.set("plait/current", "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(met, [peer(1)], 2, 30, other)
        wait_for(lambda: other.check(["plait/world 1/here/1"]))
        other.set("plait/world 1/roll", said)
        [outcome] = waiting.result()
    assert isinstance(outcome, ConnectionError) and "\x1b" not in str(outcome)
    other.set("plait/current", said)
    [outcome] = met([peer(1)], 2, seconds=1, store=other)
    assert isinstance(outcome, ConnectionError) and "\x1b" not in str(outcome)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "abc"}, "RANK='abc' is no whole number"),
        ({"RANK": "-1"}, "RANK=-1 cannot be: ranks of WORLD_SIZE=2 are 0 to 1"),
        ({"RANK": "2"}, "RANK=2 cannot be"),
        ({"RANK": " "}, "RANK not set: start this program with torchrun --nproc-per-node N, or unset WORLD_SIZE$"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 cannot be"),
        ({"WORLD_SIZE": "9" * 40}, "is no whole number"),
        ({"WORLD_SIZE": "\x1b[2J"}, r"WORLD_SIZE='\\x1b\[2J' is no"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc' is no"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 cannot be: it is a number from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set.*, or unset RANK, or unset WORLD_SIZE$"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is no"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 cannot be"),
        ({"TORCHELASTIC_RESTART_COUNT": "?"}, "TORCHELASTIC_RESTART_COUNT='\\?' is no"),
    ],
)
def test_variables_that_cannot_be_are_named(changed: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        WorldVariables.read(TORCHRUN | changed)


@pytest.mark.parametrize("local", [{"LOCAL_RANK": ""}, {"LOCAL_WORLD_SIZE": "8"}, {"LOCAL_RANK": "5"}])
def test_what_a_launcher_says_of_one_host_is_no_reason_to_refuse(local: dict[str, str]) -> None:
    assert WorldVariables.read(TORCHRUN | local).rank == 1


def test_a_file_needs_no_address() -> None:
    place = WorldVariables.read({"RANK": "0", "WORLD_SIZE": "1", "PLAIT_STORE": "/a/b"})
    assert (place.file, place.where) == ("/a/b", "/a/b")


HOLD_A_STORE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""

HOLDERS: dict[str, Callable[[socket.socket], object]] = {
    "silent": lambda c: time.sleep(5),
    "half": lambda c: (c.sendall(b"\1\2"), time.sleep(5)),
    "http": lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "closes": lambda c: None,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_port_that_another_program_holds_is_an_error_within_the_deadline(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hold() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        HOLDERS[kind](connection)

        threading.Thread(target=hold, daemon=True).start()
        place = WorldVariables.read(TORCHRUN | {"MASTER_PORT": str(listening.getsockname()[1])})
        with pytest.raises((ConnectionError, TimeoutError), match=r"found no store at .* not of another program"):
            open_store(place, 0.5)


def test_a_second_rank_0_does_not_share_the_store_of_the_first() -> None:
    """As where one command is started twice on a host, with the same port."""
    first = [sys.executable, "-c", HOLD_A_STORE]
    with subprocess.Popen(first, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        place = WorldVariables.read(TORCHRUN | {"RANK": "0", "MASTER_PORT": holder.stdout.readline().strip()})
        with pytest.raises(
            ConnectionError, match=r"cannot listen .*EADDRINUSE.*: does another rank 0 have MASTER_PORT"
        ):
            open_store(place, 20)
        holder.kill()


@pytest.mark.parametrize("name", ["no.such.host.invalid", "a" * 70])
def test_a_name_that_leads_nowhere(name: str) -> None:
    place = WorldVariables.read(TORCHRUN | {"MASTER_ADDR": name})
    with pytest.raises(ConnectionError, match=rf"found no store at {name}:29500 .* is MASTER_ADDR a name"):
        open_store(place, 0.3)


@pytest.mark.parametrize(
    "error", [socket.gaierror(-3, "not yet"), OSError(errno.EHOSTUNREACH, "no route"), ConnectionRefusedError()]
)
def test_a_name_a_route_and_a_store_may_come_late(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)  # type: ignore[attr-defined]
    place = WorldVariables.read(TORCHRUN | {"MASTER_PORT": str(store.port)})
    fails, connect = [error] * 3, socket.create_connection

    def late(*given: Any, **more: Any) -> socket.socket:
        if fails:
            raise fails.pop()
        return connect(*given, **more)

    monkeypatch.setattr(socket, "create_connection", late)
    open_store(place, 30).set("came", "")
    assert not fails and store.check(["came"])
    fails[:] = [error] * 1000
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
        open_store(place, 0.1)


def test_a_file_to_meet_in_has_the_deadline_and_where_it_cannot_be_that_is_said_at_once(tmp_path: Path) -> None:
    assert file_store(str(tmp_path / "store"), 3).timeout == timedelta(seconds=3)
    with pytest.raises(ConnectionError, match=r"in a file of the temporary folder: \[Errno 2\].*'.*removed/store'"):
        file_store(str(tmp_path / "removed" / "store"), 3)


def test_whether_collectives_are_checked_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()
    monkeypatch.setattr(ProcessComm, "from_env", lambda *_, **how: told.append(how["facts"]) or 1 / 0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for on in (True, False):
        with pytest.raises(ZeroDivisionError):
            plait.join("shard=2", check_collectives=on)
    assert told == [{"check_collectives": "True"}, {"check_collectives": "False"}]
