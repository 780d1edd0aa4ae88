"""Joins the world of a rank: its store, the other ranks, torch's process group.

    environment.py       this rank, and the address of the store
    open_store           a file on one host; otherwise torchrun's store, or that of rank 0
    store_rendezvous.py  all ranks are there, each once, and agree
    process group        torch's own rendezvous, in the same store

One deadline covers all of it.  Errors are reported before the first operation.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from plait.comm.deadline import clock, within
from plait.comm.environment import WorldVariables
from plait.comm.process_identity import Peer, hosts_of
from plait.comm.store_rendezvous import Met, meet
from plait.messages.escape import one_line

if TYPE_CHECKING:
    from plait.torch_private import Store

_stores: Any = dist  # torch's stubs do not export them

POLL_SECONDS = 0.05
LATE_SECONDS = 1.0
"""Extra seconds for a call with a deadline, before it is abandoned."""


def meet_ranks(place: WorldVariables, deadline: float, facts: dict[str, str]) -> Met:
    """Meets the other ranks in their store.

    Args:
        facts: values that must be the same on all ranks, by name, in addition to WORLD_SIZE.

    Raises:
        ConnectionError: the port is taken, or a program that is not a store answers there.
        TimeoutError: some ranks did not come within the deadline; the message names them.
        ValueError: ranks differ in a fact; the message names them.
    """
    end, same = clock() + deadline, {"WORLD_SIZE": str(place.size), **facts}
    mine = Peer(place.rank, socket.gethostname(), os.getpid(), same, place.restarts)
    store = _stores.PrefixStore(f"job {place.job}", open_store(place, deadline))
    lost = f"rank {place.rank} lost the store at {place.where}"
    itself = f". MASTER_ADDR={place.address} is each host itself: for several hosts, give the name of rank 0's"
    hint = itself if place.address == "localhost" or place.address.startswith("127.") else ""
    with _told(f"{lost}: its host is gone, stopped, or no store of torch", deadline, hint):
        return within(max(0.0, end - clock()) + LATE_SECONDS, lambda: meet(store, mine, place.size, end))


def make_group(place: WorldVariables, met: Met, backend: str, deadline: float) -> None:
    """Makes torch's default process group of ranks that have met.

    Raises:
        ConnectionError, TimeoutError: they do not reach each other.
    """
    named = ". If a host's name leads to loopback, set GLOO_SOCKET_IFNAME to its network interface"
    hint = named if len(hosts_of(met.peers)) > 1 else ""
    with _told(f"rank {place.rank} met all {place.size} ranks but could not connect to them", deadline, hint):
        options: dict[str, Any] = {"store": met.store, "rank": place.rank, "world_size": place.size}
        options["timeout"] = timedelta(seconds=deadline)
        within(deadline + LATE_SECONDS, lambda: dist.init_process_group(backend, **options))


def open_store(place: WorldVariables, deadline: float) -> Store:
    """Returns the store in which the ranks meet.

    Raises:
        ConnectionError, TimeoutError: it cannot be made or reached; the message names the address and the fix.
    """
    if place.file:
        return file_store(place.file, deadline)
    end, hosts = clock() + deadline, not (place.rank or place.agents_store)

    def opened(host: bool) -> Store:
        patience = timedelta(seconds=max(1.0, end - clock()))
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": host}
        store: Store = _stores.TCPStore(place.address, place.port, place.size, host, patience, **options)
        return store

    def reached() -> Store:
        if hosts:
            try:
                return opened(True)
            except RuntimeError as error:
                taken = "address already in use" in str(error).lower()
                if not (taken and dist.is_initialized()):  # otherwise this very process may have created it
                    raise
        _wait_for_listener(place.address, place.port, end)
        return opened(False)

    try:
        return within(deadline + LATE_SECONDS, reached)
    except (RuntimeError, OSError, UnicodeError) as error:
        silent = isinstance(error, TimeoutError)
        reason = "nothing answers" if silent else _first(error)
        text = f"found no store at {place.where} within {deadline:g} s ({reason}): is rank 0 running"
        if hosts:
            text = f"cannot listen on {place.where} ({reason}): does another rank 0 have MASTER_PORT (--master-port)"
        fix = "is MASTER_ADDR a name or address of rank 0's host, and MASTER_PORT not of another program?"
        raise (TimeoutError if silent else ConnectionError)(f"rank {place.rank} {text}, {fix}") from error


def file_store(path: str, deadline: float) -> Store:
    """Opens a store in a file, for the processes of one host that may open it; the creator of its folder removes it.

    Raises:
        ConnectionError: the folder is gone, or full.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # torch would look for its folder for 300 s
        store: Store = _stores.FileStore(path, -1)
    except (OSError, RuntimeError) as error:
        raise ConnectionError(f"the ranks cannot meet in a file of the temporary folder: {_first(error)}") from error
    store.set_timeout(timedelta(seconds=deadline))
    return store


def _wait_for_listener(address: str, port: int, end: float) -> None:
    """Returns when a program listens at a port.  torch's client would only say that its time was up.

    Raises:
        OSError: until ``end``, as of ``deadline.clock``, none listened, the name was unknown, or no route led there.
    """
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.01, end - clock())).close()
        except OSError:  # a store, a name or a route may appear after this rank
            if clock() + POLL_SECONDS >= end:
                raise
            time.sleep(POLL_SECONDS)


@contextmanager
def _told(what: str, deadline: float, hint: str = "") -> Iterator[None]:
    """Turns errors of torch, and a call that did not return, into errors that name ``what``."""
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{str(error) or f'{what} within {deadline:g} s'}{hint}") from error  # the meeting has words
    except RuntimeError as error:
        raise ConnectionError(f"{what} ({_first(error)}){hint}") from error


def _first(error: BaseException) -> str:
    return one_line(str(error).splitlines()[0] if str(error) else repr(error), 300)
