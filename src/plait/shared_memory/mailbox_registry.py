"""Makes, publishes and opens the mailboxes of all ranks of a host.

A rank makes one mailbox for each other rank, in its own segment, and writes its place into the store.  Then it opens
the others' mailboxes, with a descriptor of each process that shows when it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from plait.comm.process_identity import Peer, from_json
from plait.comm.store_rendezvous import wait_for_keys
from plait.shared_memory import mailbox
from plait.shared_memory.alarm import Alarm
from plait.shared_memory.mailbox import Mailbox
from plait.shared_memory.segment import Segment

if TYPE_CHECKING:
    from plait.torch_private import Store


@dataclass(frozen=True)
class Published:
    """A rank's entry in the store: the segment of its mailboxes."""

    descriptor: int
    name: str


class MailboxRegistry:
    """The mailboxes of rank ``rank``: ``inboxes`` from and ``outboxes`` to each other rank of its host.

    Args:
        peers: the ranks of the host.
        end: the time to give up, by ``deadline.clock``.

    Raises:
        ValueError: the ranks cannot see each other's processes.
        TimeoutError: a rank did not publish its mailboxes.
    """

    def __init__(self, rank: int, store: Store, peers: Sequence[Peer], end: float) -> None:
        place = {peer.rank: place * mailbox.BYTES for place, peer in enumerate(peers)}
        self.rank, self.process_ids = rank, {peer.rank: peer.pid for peer in peers}
        self.name = f"plait-{secrets.token_hex(8)}"
        """The name of all segments of this rank in this world."""
        self._names: dict[int, str] = {}
        self._mine = Segment.make(len(peers) * mailbox.BYTES, self.name)
        others = [peer for peer in peers if peer.rank != rank]
        self.inboxes = {peer.rank: Mailbox(self._mine, place[peer.rank]) for peer in others}
        for box in self.inboxes.values():
            box.begin()
        self.alarm = Alarm(self._mine.address + place[rank])  # the unused place of a mailbox to oneself
        self.alarm.begin()
        self.alarms: dict[int, Alarm] = {}
        """The alarms of the other ranks."""
        self.outboxes: dict[int, Mailbox] = {}
        self._segments: dict[tuple[int, int], Segment] = {}
        self._ends = select.poll()
        self._holds: dict[int, int] = {}
        store.set(f"shared_memory/{rank}", json.dumps(asdict(Published(self._mine.descriptor, self.name))))
        for peer in others:
            if not wait_for_keys(store, [key := f"shared_memory/{peer.rank}"], end):
                raise TimeoutError(f"rank {rank} waited for {peer}, which published no mailboxes")
            self._reach(peer, from_json(Published, store.get(key)), place)

    def _reach(self, peer: Peer, theirs: Published, place: Mapping[int, int]) -> None:
        """Opens a rank's mailboxes, and a descriptor of its process, which becomes readable when the process ends."""
        self._names[peer.rank] = theirs.name
        try:
            hold = os.pidfd_open(peer.pid)
            segment = self.segment(peer.rank, theirs.descriptor)
        except OSError as error:
            text = f"rank {self.rank} cannot reach the memory of {peer} on {socket.gethostname()} ({error.strerror})"
            fix = "they are in two containers, of two users, or it ended. Else take --world process"
            raise ValueError(f"{text}: {fix}") from error
        self.outboxes[peer.rank] = Mailbox(segment, place[self.rank])
        self.alarms[peer.rank] = Alarm(segment.address + place[peer.rank])
        self._holds[hold] = peer.rank
        self._ends.register(hold, select.POLLIN)

    def segment(self, rank: int, descriptor: int) -> Segment:
        """Returns a segment of another rank; opens it at the first call."""
        key = rank, descriptor
        if key not in self._segments:
            self._segments[key] = self.open(rank, descriptor)
        return self._segments[key]

    def open(self, rank: int, descriptor: int) -> Segment:
        """Opens a segment of another rank anew; raises OSError if it is gone."""
        return Segment.open(self.process_ids[rank], descriptor, self._names[rank])

    def ended(self) -> list[int]:
        """Returns the ranks whose processes have ended."""
        return [self._holds[hold] for hold, _ in self._ends.poll(0)]

    def close(self) -> None:
        for hold in self._holds:
            os.close(hold)
        self._mine.close()
