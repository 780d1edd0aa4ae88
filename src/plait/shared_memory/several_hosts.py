"""The transport of a world that asked for shared memory: memory inside of a host, sockets across.

    group inside of a host     transport.py     no socket
    group across               gloo             its own threads move the messages

An operation's group decides.  Messages in shared memory advance only while a rank waits.  So a rank that waits for
another host also advances those of its own host; otherwise two hosts could wait for each other in a ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.deadline import clock
from plait.comm.gloo import GlooTransport
from plait.comm.operation import Operation
from plait.comm.process_identity import Peer
from plait.comm.transport import Started, Transport
from plait.shared_memory.mailbox_registry import MailboxRegistry
from plait.shared_memory.transport import SharedMemoryTransport

NAP_SECONDS = 0.0005
"""The seconds between two advances of this host's messages, while this rank waits for another host."""


def transport(comm: Comm) -> Transport:
    """Makes the transport of one rank; ``comm/process.py`` imports this by name."""
    assert comm.store is not None
    here = [peer for peer in comm.peers if peer.host == comm.peers[comm.rank].host]
    across = GlooTransport(comm) if len(here) < len(comm.peers) else None
    inside = SharedMemoryTransport(MailboxRegistry(comm.rank, comm.store, here, clock() + comm.deadline), comm)
    return inside if across is None else HostsTransport(here, inside, across, comm)


def _by_group(name: str) -> Callable[..., Any]:
    """Returns a method that the transport of an operation's group carries out."""

    def carried_out(self: HostsTransport, operation: Operation, *given: Any) -> Any:
        return getattr(self._of(operation), name)(operation, *given)

    return carried_out


class HostsTransport(Transport):
    """Messages of one rank.

    Args:
        here: the ranks of its host.
    """

    over_sockets = True

    def __init__(self, here: Sequence[Peer], inside: SharedMemoryTransport, across: GlooTransport, comm: Comm) -> None:
        self._here, self.inside, self.across = {peer.rank for peer in here}, inside, across
        super().__init__(comm)

    @property
    def broken(self) -> str:
        """The reason why nothing more can be started: one broken part breaks the other."""
        return self.inside.broken or self.across.broken

    @broken.setter
    def broken(self, why: str) -> None:
        self.inside.broken = self.inside.broken or why
        self.across.broken = self.across.broken or why

    def _of(self, operation: Operation) -> SharedMemoryTransport | GlooTransport:
        self.broken = self.broken
        return self.inside if self._here.issuperset(operation.group.ranks) else self.across

    send, recv = _by_group("send"), _by_group("recv")
    exchange, reduce = _by_group("exchange"), _by_group("reduce")
    library, common = _by_group("library"), _by_group("common")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.inside.empty(numel, dtype)

    def wait_for_readers(self) -> None:
        self.inside.wait_for_readers()

    def wrote_common(self, *, later: bool) -> None:
        self.inside.wrote_common(later=later)

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        part = self._of(operation)
        if part is self.inside or not self.inside.is_busy:
            part.wait(operation, works)
            return
        outcome: Future[None] = Future()

        def wait() -> None:
            try:
                outcome.set_result(part.wait(operation, works))
            except BaseException as error:
                outcome.set_exception(error)

        Thread(target=wait, name="plait-across", daemon=True).start()
        while not outcome.done():
            self.inside.get_on(operation)
            time.sleep(NAP_SECONDS)
        outcome.result()

    def give_up(self, why: str) -> None:
        self.inside.give_up(why)
        self.broken = why

    def close(self) -> None:
        self.inside.close()
        self.across.close()
