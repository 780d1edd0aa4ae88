"""How the ranks of a world find out, in one store and before anything else, that they are the ranks of one world.

    rank 0       opens a world          plait/current = 4: it is the fourth that has met in this store
    every rank   claims its place       here/2 = {"host": "b", "pid": 77, "facts": {"WORLD_SIZE": "3", ...}}
    rank 0       reads all places       as they come: who has not come, who differs, and in what
    rank 0       writes the verdict     {"problem": "", "peers": [...]}
    every rank   reads the verdict      and goes on, or raises what it says

A world that has a verdict is over for whoever comes later.  Who waits in a world moves on when rank 0 opens another, so
ranks that are started again meet again, whatever their launchers have counted.  Two processes with one rank are known
by both being there: the one that waits answers the one that comes.

Whatever is wrong is on every rank within moments, and names ranks and fields.  A store is not authenticated, so what is
read from it is JSON of a fixed form, and its text is escaped before it is shown.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch.distributed as dist

from plait.comm.agree import differing, named
from plait.comm.deadline import clock
from plait.comm.process_identity import Peer, shown
from plait.messages.escape import one_line, printable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_prefix_store: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch's stubs do not export it

POLL_SECONDS, SLOWEST_POLL = 0.02, 0.2
"""Between two looks into the store: at the beginning, and after some seconds."""
OTHERS_SECONDS = 1.5
"""How long rank 0, when two ranks differ, waits for the others, so that it can say who is alone with what."""
UNKNOWN = "(unknown)"
"""The value of a fact that a rank cannot tell; it agrees with any."""


class Met(NamedTuple):
    """A world that has come together."""

    store: Store
    """This world's part of the store."""
    peers: tuple[Peer, ...]
    attempt: int
    """How often these ranks were started before."""


def meet(store: Store, mine: Peer, size: int, end: float) -> Met:
    """The next world that meets in ``store``, which is one job's.

    Args:
        end: when this rank has waited long enough, as of ``deadline.clock``.

    Raises:
        ValueError: ranks differ in what must be the same, or two have one place.
        TimeoutError: some did not come; the message names them.
    """
    started = clock()
    here, verdict = (_enter if mine.rank else _open)(store, mine, size, end)
    peers = [Peer(rank, host, pid, token=token) for rank, host, pid, token in verdict.peers]
    if not verdict.problem and peers and verdict.size != size:
        problem = f"{mine} has WORLD_SIZE={size}, {peers[0]} has {verdict.size}"
        verdict = replace(verdict, problem=f"ranks differ: {problem}. Start all of them alike")
    if verdict.problem:
        raise ValueError(verdict.problem)
    if verdict.absent:
        waited = f"rank {mine.rank} waited {clock() - started:.1f} s for {size} ranks"
        raise TimeoutError(f"{waited}: {named(verdict.absent)} did not come{verdict.more}")
    return Met(here, tuple(peers), verdict.attempt)


@dataclass(frozen=True)
class WorldVerdict:
    """What rank 0 found of the ranks of a world."""

    problem: str
    absent: list[int]
    peers: list[tuple[int, str, int, str]]
    """Rank, host, process id and token of each that came."""
    attempt: int = 0
    more: str = ""
    """What a rank that waited in vain has to add."""

    @property
    def size(self) -> int:
        """WORLD_SIZE of rank 0; 0 where nobody has come."""
        return len(self.peers) + len(self.absent) if self.peers else 0

    @classmethod
    def parse(cls, data: bytes) -> Self:
        try:
            said = json.loads(data)
            peers = [(int(rank), str(host), int(pid), str(token)) for rank, host, pid, token in said["peers"]]
            problem, absent = printable(str(said["problem"]), 5000), [int(rank) for rank in said["absent"]]
            return cls(problem, absent, peers, int(said["attempt"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            text = "the verdict in the store was not written by rank 0"
            raise ConnectionError(f"{text}: '{shown(data)}'") from error


def _open(store: Store, mine: Peer, size: int, end: float) -> tuple[Store, WorldVerdict]:
    """Rank 0: a new world, and what it finds of its ranks."""
    other, number = _at(_world(store, _current(store)), 0), store.add("plait/worlds", 1)
    if other:  # the rank 0 of the world before, perhaps this very process
        mine = replace(mine, restarts=max(mine.restarts, other.restarts + (other.token != mine.token)))
    here = _world(store, number)
    here.set("here/0", mine.text)
    store.set("plait/current", str(number))
    if other and other.is_another_here(mine):  # its world is over, or it will say so as well
        problem, peers = _same_rank(mine, other), [mine]
    else:
        problem, peers = _gather(store, number, mine, size, end)
    absent = sorted(set(range(size)) - {peer.rank for peer in peers})
    came = [(peer.rank, peer.host, peer.pid, peer.token) for peer in peers]
    verdict = WorldVerdict(problem, absent, came, max(peer.restarts for peer in peers))
    here.set("verdict", json.dumps(asdict(verdict)))
    if problem or absent:  # they read it in a store that may end with this rank
        wait_for_keys(here, [f"read/{peer.rank}" for peer in peers[1:]], clock() + OTHERS_SECONDS)
    return here, verdict


def _enter(store: Store, mine: Peer, size: int, end: float) -> tuple[Store, WorldVerdict]:
    """The other ranks: the first world that comes together with this one, and what rank 0 says of it."""
    started, number, claims, over = clock(), 0, False, True
    here = _world(store, number)
    while (now := clock()) < end + POLL_SECONDS * 5:
        current = _current(store)  # before the verdict is looked for: rank 0 opens no other before it has written it
        if not over and here.check(["verdict"]):
            verdict = WorldVerdict.parse(here.get("verdict"))
            if claims or verdict.problem:
                here.set(f"read/{mine.rank}", "")
                return here, verdict
            over = True  # of another process with this rank, which was there when it came
        elif current != number:
            number, here = current, _world(store, current)
            over = here.check(["verdict"])
            claims = not over and _claim(here, mine)
            if over and (other := _at(here, mine.rank)) and other.is_another_here(mine):
                return here, WorldVerdict(_same_rank(mine, other), [], [])
        elif claims and here.check([f"also/{mine.rank}"]):
            here.set("problem", _same_rank(mine, Peer.parse(here.get(f"also/{mine.rank}"))))
        time.sleep(min(SLOWEST_POLL, POLL_SECONDS + (now - started) / 20))
    if not over:
        return here, WorldVerdict("", [r for r in range(size) if not here.check([f"here/{r}"])] or [0], [])
    return here, _in_vain(here, mine, size) if number else WorldVerdict("", [0], [])


def _in_vain(here: Store, mine: Peer, size: int) -> WorldVerdict:
    """For a rank for which rank 0 opened no world: what the one before tells, which is over."""
    last, other = WorldVerdict.parse(here.get("verdict")), _at(here, mine.rank)
    if last.size not in (0, size):
        return replace(last, problem="")
    told = f". The world before was refused: {last.problem}" if last.problem else ""
    if not told and other and other.token != mine.token:
        told = f". In the world before {other} had this place"
    return WorldVerdict("", [0], [], more=told)


def _claim(here: Store, mine: Peer) -> bool:
    """Whether this rank's place is its own; else the holder is asked to say that it is there.  One of an earlier start
    says nothing."""
    holder = Peer.parse(here.compare_set(f"here/{mine.rank}", "", mine.text))
    own = holder.token == mine.token
    here.set(f"here/{mine.rank}" if own else f"also/{mine.rank}", mine.text)
    return own


def _same_rank(one: Peer, other: Peer) -> str:
    return f"{one} and {other} have the same RANK: give each process its own"


def _world(store: Store, number: int) -> Store:
    """A world's part of the store."""
    here: Store = _prefix_store(f"plait/world {number}", store)
    return here


def _current(store: Store) -> int:
    """The number of the world that rank 0 opened last; 0 before the first."""
    if not store.check(["plait/current"]):
        return 0
    said = store.get("plait/current")
    if not said.isdigit() or len(said) > 18:
        raise ConnectionError(f"the number of a world in the store was not written by rank 0: '{shown(said)}'")
    return int(said)


def _gather(store: Store, number: int, mine: Peer, size: int, end: float) -> tuple[str, list[Peer]]:
    """What is wrong, if anything is, and the ranks that have come."""
    here, peers = _world(store, number), {0: mine}
    while True:
        for rank in range(1, size):
            if rank not in peers and (peer := _at(here, rank)):
                peers[rank] = peer
        come = [peers[rank] for rank in sorted(peers)]
        if (current := _current(store)) != number:  # another rank 0 has opened it while this one waits
            other = _world(store, current)
            problem = _same_rank(mine, _at(other, 0) or mine)
            other.set("problem", problem)
            return problem, come
        if here.check(["problem"]):
            return printable(here.get("problem").decode(errors="replace"), 2000), come
        now, problem = clock(), _problem(come)
        if len(come) == size or now >= end:
            return problem, come
        if problem:
            end = min(end, now + OTHERS_SECONDS)
        time.sleep(POLL_SECONDS)


def _problem(peers: Sequence[Peer]) -> str:
    """Why these cannot be ranks of one world; empty if they can."""
    known: dict[str, set[str]] = {}
    for name, value in ((name, value) for peer in peers for name, value in peer.facts.items() if value != UNKNOWN):
        known.setdefault(name, set()).add(value)
    agreed = {name: values.pop() for name, values in known.items() if len(values) == 1}
    facts = {p.rank: {n: agreed.get(n, v) if v == UNKNOWN else v for n, v in p.facts.items()} for p in peers}
    if lines := differing(facts):
        told = "; ".join(one_line(line, 1000) for line in lines)
        hosts = ", ".join(map(str, peers[:8])) + (", ..." if len(peers) > 8 else "")
        return f"ranks differ: {told}. Start all of them alike: {hosts}"
    alone = [peer for peer in peers if peer.loopback]
    if alone and len({peer.host for peer in peers}) > 1:
        return (
            f"the name of the host of {alone[0]} leads to loopback there, or nowhere, so no other host can reach it: "
            f"set GLOO_SOCKET_IFNAME to its network interface (ip -brief address shows them), or mend its /etc/hosts"
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


def wait_for_keys(here: Store, keys: list[str], end: float) -> bool:
    """Whether the keys were there in time."""
    while not here.check(keys):
        if clock() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def loopback_only(name: str, resolve: Callable[..., Any] = socket.getaddrinfo) -> bool:
    """Whether a host's name leads to nothing but this host itself."""
    found = {str(address[4][0]) for address in resolve(name, None)}
    return all(address.startswith("127.") or address == "::1" for address in found)
