"""The ranks of a world meet in a store, before anything else, and compare their facts.

    rank 0       opens a world              plait/current = 4: the fourth that met in this store
    every rank   says that it is there      here/2 = {"host": "b", "pid": 77, "facts": {"WORLD_SIZE": "3", ...}}
    rank 0       closes the world           roll = the ranks that have come
    every rank   reads the roll             goes on if all are there and their facts are the same

A world that has a roll is over for later ranks.  A waiting rank moves on when rank 0 opens another world, so ranks
that are started again meet again, whatever their launchers have counted.  A waiting process whose rank another process
takes is refused.  All text is read as JSON of a fixed form and escaped before it is shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from plait.comm.deadline import clock
from plait.comm.process_identity import Peer, from_json, shown
from plait.comm.texts import differing, named
from plait.messages.escape import one_line, printable

if TYPE_CHECKING:
    from plait.torch_private import Store

POLL_SECONDS, SLOWEST_POLL = 0.02, 0.2
"""Seconds between two looks into the store: at first, and after some seconds."""
READ_SECONDS = 1.5
"""Seconds that rank 0 gives the others, to come and to read the roll, once it sees that the world is wrong."""


class Met(NamedTuple):
    """A world whose ranks have met."""

    store: Store
    """This world's part of the store."""
    peers: tuple[Peer, ...]
    attempt: int
    """The number of earlier starts of these ranks."""


@dataclass(frozen=True)
class Roll:
    """The ranks that have come to a world, each as ``Peer.text``, rank 0 first."""

    peers: list[str]


def meet(store: Store, mine: Peer, size: int, end: float) -> Met:
    """Joins the next world that meets in ``store``, which belongs to one job.

    Args:
        end: the end of this rank's patience, by ``deadline.clock``.

    Raises:
        ValueError: ranks differ in a fact that must be the same.
        TimeoutError: some ranks did not come; the message names them.
    """
    started = clock()
    here, peers = (_enter if mine.rank else _open)(store, mine, size, end)
    if absent := sorted(set(range(size)) - {peer.rank for peer in peers}):
        raise _late(mine, size, started, absent)
    return Met(here, tuple(peers), max(peer.restarts for peer in peers))


def _open(store: Store, mine: Peer, size: int, end: float) -> tuple[Store, list[Peer]]:
    """Opens a world as rank 0, waits for its ranks, and closes it."""
    if before := _at(_world(store, _current(store)), 0):  # perhaps this very process
        mine = replace(mine, restarts=max(mine.restarts, before.restarts + (before.token != mine.token)))
    number = store.add("plait/worlds", 1)
    here, peers, differ = _world(store, number), {0: mine}, False
    here.set("here/0", mine.text)
    store.set("plait/current", str(number))
    while len(peers) < size and clock() < end:
        new = {rank: peer for rank in range(1, size) if rank not in peers and (peer := _at(here, rank))}
        peers |= new
        _check_alone(mine, _at(_world(store, _current(store)), 0))
        if new and not differ and differing({rank: peer.facts for rank, peer in peers.items()}):
            differ, end = True, min(end, clock() + READ_SECONDS)  # others that come show which of them is alone
        time.sleep(POLL_SECONDS if len(peers) < size else 0)
    came = [peers[rank] for rank in sorted(peers)]
    here.set("roll", json.dumps(asdict(Roll([peer.text for peer in came]))))
    if differ or len(came) < size:  # the others read the roll in a store that may end with this rank
        wait_for_keys(here, [f"read/{peer.rank}" for peer in came[1:]], clock() + READ_SECONDS)
    _check_facts(came)
    return here, came


def _enter(store: Store, mine: Peer, size: int, end: float) -> tuple[Store, list[Peer]]:
    """Takes another rank's place in the newest world, and moves on while that world is not its own."""
    started, number, over, holder = clock(), 0, True, ""
    here = _world(store, number)
    while (now := clock()) < end + POLL_SECONDS * 5:
        current = _current(store)  # read before the roll: rank 0 opens no other world before it has written it
        if current != number:
            number, here = current, _world(store, current)
            over = here.check(["roll"])
            if not over:
                here.set(f"here/{mine.rank}", mine.text)
        elif not over and here.check(["roll"]):
            roll = {peer.rank: peer for peer in map(Peer.parse, from_json(Roll, here.get("roll")).peers)}
            here.set(f"read/{mine.rank}", "")
            _check_facts([*(roll | {mine.rank: mine}).values()])  # a rank beyond rank 0's WORLD_SIZE is not on the roll
            if mine in roll.values():
                return here, list(roll.values())
            over, holder = True, f", and {roll.get(mine.rank)} has the place of {mine}"
        elif not over:
            _check_alone(mine, _at(here, mine.rank))
        time.sleep(min(SLOWEST_POLL, POLL_SECONDS + (now - started) / 20))
    absent = [rank for rank in range(size) if not (over or here.check([f"here/{rank}"]))]
    raise _late(mine, size, started, absent or [0], holder)


def _check_alone(mine: Peer, holder: Peer | None) -> None:
    """Refuses two processes of one rank."""
    if holder not in (None, mine):
        raise ValueError(f"{mine} and {holder} have the same rank: give each process its own RANK")


def _check_facts(peers: Sequence[Peer]) -> None:
    """Refuses processes that differ in a fact."""
    if lines := differing({peer.rank: peer.facts for peer in peers}):
        told = "; ".join(one_line(line, 1000) for line in lines)
        some = ", ".join(map(str, peers[:8])) + (", ..." if len(peers) > 8 else "")
        raise ValueError(printable(f"ranks differ: {told}. Start all of them in the same way: {some}", 5000))


def _late(mine: Peer, size: int, started: float, absent: list[int], holder: str = "") -> TimeoutError:
    waited = f"rank {mine.rank} waited {clock() - started:.1f} s for {size} ranks"
    return TimeoutError(f"{waited}: {named(absent)} did not come{holder}")


def _world(store: Store, number: int) -> Store:
    """Returns a world's part of the store."""
    here: Store = dist.PrefixStore(f"plait/world {number}", store)  # type: ignore[attr-defined]  # torch's stubs lack it
    return here


def _current(store: Store) -> int:
    """The number of the world that rank 0 opened last; 0 if there is none."""
    if not store.check(["plait/current"]):
        return 0
    said = store.get("plait/current")
    if not said.isdigit() or len(said) > 18:
        raise ConnectionError(f"the number of a world in the store was not written by rank 0: '{shown(said)}'")
    return int(said)


def _at(here: Store, rank: int) -> Peer | None:
    """Returns the process that has a place, or None."""
    if not here.check([f"here/{rank}"]):
        return None
    peer = Peer.parse(here.get(f"here/{rank}"))
    if peer.rank != rank:
        raise ConnectionError(f"the store has {peer} as rank {rank}")
    return peer


def wait_for_keys(here: Store, keys: list[str], end: float) -> bool:
    """Returns True once the keys are there, False if they do not appear in time."""
    while not here.check(keys):
        if clock() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True
