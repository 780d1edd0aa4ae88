"""How the ranks of a world find out, in one store and before anything else, that they are the ranks of one world.

    every rank   claims its place       here/2 = {"host": "b", "pid": 77, "facts": {"WORLD_SIZE": "3", ...}}
    rank 0       reads all places       as they come: who has not come, who differs, and in what
    rank 0       writes the verdict     {"problem": "", "peers": [...]}
    every rank   reads the verdict      and goes on, or raises what it says

A place can be claimed once, so a second process with the same rank is known at once, with both hosts and process ids.
Whatever is wrong is on every rank within moments, and names ranks and fields.  A program may close one world and join
another: each has a number, and names of its own in the store.  A store is not authenticated, so what is read from it is
JSON of a fixed form, and its text is escaped before it is shown.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from plait.comm.agree import differing, named
from plait.comm.peer import Peer, shown
from plait.core.escape import one_line, printable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_prefix_store: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch's stubs do not export it

POLL_SECONDS = 0.02
OTHERS_SECONDS = 1.5
"""How long rank 0, when two ranks differ, waits for the others, so that it can say who is alone with what."""


def meet(store: Store, mine: Peer, size: int, end: float, attempt: int = 0) -> tuple[Store, tuple[Peer, ...]]:
    """This world's part of ``store``, and its ranks.

    Args:
        end: when this rank has waited long enough, as of ``time.monotonic``.
        attempt: how often the ranks were started again.

    Raises:
        ValueError: ranks differ in what must be the same, or two have one place.
        TimeoutError: some did not come; the message names them.
    """
    started = time.monotonic()
    here = _claim(store, mine, attempt)
    if mine.rank == 0:
        problem, peers = _gather(here, mine, size, end)
        absent = sorted(set(range(size)) - {peer.rank for peer in peers})
        verdict = WorldVerdict(problem, absent, [(peer.rank, peer.host, peer.pid) for peer in peers])
        here.set("verdict", json.dumps(asdict(verdict)))
        if problem or absent:  # they read it in a store that may end with this rank
            _wait(here, [f"read/{peer.rank}" for peer in peers[1:]], time.monotonic() + OTHERS_SECONDS)
    elif _wait(here, ["verdict"], end + POLL_SECONDS * 5):
        verdict = WorldVerdict.parse(here.get("verdict"))
        here.set(f"read/{mine.rank}", "")
    else:
        verdict = WorldVerdict("", [r for r in range(size) if not here.check([f"here/{r}"])] or [0], [])
    peers = [Peer(rank, host, pid, token="") for rank, host, pid in verdict.peers]
    if not verdict.problem and peers and len(peers) + len(verdict.absent) != size:
        problem = f"{mine} has WORLD_SIZE={size}, {peers[0]} has {len(peers) + len(verdict.absent)}"
        verdict = replace(verdict, problem=f"ranks differ: {problem}. Start all of them alike")
    if verdict.problem:
        raise ValueError(verdict.problem)
    if verdict.absent:
        waited = f"rank {mine.rank} waited {time.monotonic() - started:.1f} s for {size} ranks"
        raise TimeoutError(f"{waited}: {named(verdict.absent)} did not come")
    return here, tuple(peers)


@dataclass(frozen=True)
class WorldVerdict:
    """What rank 0 found of the ranks of a world."""

    problem: str
    absent: list[int]
    peers: list[tuple[int, str, int]]
    """Rank, host and process id of each that came."""

    @classmethod
    def parse(cls, data: bytes) -> Self:
        try:
            said = json.loads(data)
            peers = [(int(rank), str(host), int(pid)) for rank, host, pid in said["peers"]]
            return cls(printable(str(said["problem"]), 5000), [int(rank) for rank in said["absent"]], peers)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            text = "the verdict in the store was not written by rank 0"
            raise ConnectionError(f"{text}: '{shown(data)}'") from error


def _claim(store: Store, mine: Peer, attempt: int) -> Store:
    """The first world in which the place of this rank is free, claimed."""
    for number in count():
        here: Store = _prefix_store(f"plait/world {attempt}.{number}", store)
        holder = here.compare_set(f"here/{mine.rank}", "", mine.text)
        if holder.decode(errors="replace") == mine.text:
            return here
        other = Peer.parse(holder)
        # It was this very process, or one that is gone: that world is over.
        if (other.host, other.pid) == (mine.host, mine.pid) or not other.may_live():
            continue
        problem = f"{mine} and {other} have the same RANK: give each process its own"
        here.set("problem", problem)
        raise ValueError(problem)
    raise AssertionError


def _gather(here: Store, mine: Peer, size: int, end: float) -> tuple[str, list[Peer]]:
    """What is wrong, if anything is, and the ranks that have come."""
    peers = {0: mine}
    while True:
        for rank in range(1, size):
            if rank not in peers and (peer := _at(here, rank)):
                peers[rank] = peer
        if here.check(["problem"]):
            return printable(here.get("problem").decode(errors="replace"), 2000), list(peers.values())
        come = [peers[rank] for rank in sorted(peers)]
        now, problem = time.monotonic(), _problem(come)
        if len(come) == size or now >= end:
            return problem, come
        if problem:
            end = min(end, now + OTHERS_SECONDS)
        time.sleep(POLL_SECONDS)


def _problem(peers: Sequence[Peer]) -> str:
    """Why these cannot be ranks of one world; empty if they can."""
    if lines := differing({peer.rank: peer.facts for peer in peers}):
        told = "; ".join(one_line(line, 1000) for line in lines)
        hosts = ", ".join(map(str, peers[:8])) + (", ..." if len(peers) > 8 else "")
        return f"ranks differ: {told}. Start all of them alike: {hosts}"
    alone = [peer for peer in peers if peer.loopback]
    if alone and len({peer.host for peer in peers}) > 1:
        return (
            f"the name of the host of {alone[0]} resolves to loopback there, where other hosts cannot reach it: set "
            f"GLOO_SOCKET_IFNAME to its network interface (ip -brief address shows them), or mend its /etc/hosts"
        )
    return ""


def _at(here: Store, rank: int) -> Peer | None:
    """Who has claimed a place."""
    if not here.check([f"here/{rank}"]):
        return None
    peer = Peer.parse(here.get(f"here/{rank}"))
    if peer.rank != rank:
        raise ConnectionError(f"the store has {peer} in the place of rank {rank}")
    return peer


def _wait(here: Store, keys: list[str], end: float) -> bool:
    """Whether the keys were there in time."""
    while not here.check(keys):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def loopback_only(name: str, resolve: Callable[..., Any] = socket.getaddrinfo) -> bool:
    """Whether a host's name leads to nothing but this host itself."""
    found = {str(address[4][0]) for address in resolve(name, None)}
    return all(address.startswith("127.") or address == "::1" for address in found)
