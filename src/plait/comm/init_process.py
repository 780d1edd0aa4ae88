"""How the ranks of a process world find each other: a store, a meeting in it, torch's process group.

    environment.py      who am I, and where is the store
    open_store          torchrun's store, or that of rank 0
    meeting.py          are we all here, each once, and alike
    process group       torch's own rendezvous, which reads addresses in the same store

All of it stands under one deadline.  Whatever is wrong is reported before the first operation.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plait.comm.deadline import within
from plait.comm.environment import WorldVariables
from plait.comm.meeting import Peer, loopback_only, meet
from plait.core.escape import one_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's stubs do not export it

RESOLVE_SECONDS = 2.0
"""How long the name of this host may take to be looked up; after it, it is taken for a good one."""
LATE_SECONDS = 1.0
"""What a call that has a deadline of its own is given beyond it, before it is left behind."""


def init_process(
    place: WorldVariables, backend: str, deadline: float, facts: dict[str, str]
) -> tuple[Store, tuple[Peer, ...]]:
    """Meets the other ranks and makes torch's default process group; returns the store and who the ranks are.

    Args:
        facts: what must be the same on all ranks, by name, besides the code that they run.

    Raises:
        ConnectionError: the port is taken, or what answers there is no store.
        TimeoutError: some ranks did not come within the deadline; the message names them.
        ValueError: two processes have one rank, or ranks differ in a fact; the message names them.
    """
    end, rank = time.monotonic() + deadline, place.rank
    mine = Peer(rank, socket.gethostname(), os.getpid(), {"WORLD_SIZE": str(place.size), **facts}, _on_loopback())
    store = open_store(place, deadline)
    lost = f"rank {rank} lost the store at {place.where}"
    with _told(f"{lost}: its host is gone, stopped, or no store of torch", deadline):
        left = max(0.0, end - time.monotonic())
        here, peers = within(left + LATE_SECONDS, lambda: meet(store, mine, place.size, end, place.restarts))
    left = max(1.0, end - time.monotonic())
    with _told(f"rank {rank} met all {place.size} ranks but could not connect to them", deadline):
        options: dict[str, Any] = {"store": here, "rank": rank, "world_size": place.size}
        within(
            left + LATE_SECONDS, lambda: dist.init_process_group(backend, timeout=timedelta(seconds=left), **options)
        )
    return here, peers


def open_store(place: WorldVariables, deadline: float) -> Store:
    """The store in which the ranks meet."""
    where, rank = place.where, place.rank

    def opened(host: bool) -> Store:
        patience = timedelta(seconds=0.9 * deadline)
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": host}
        store: Store = _tcp_store(place.address, place.port, place.size, host, patience, **options)
        return store

    def reached() -> Store:
        address = f"MASTER_ADDR={one_line(place.address, 100)}"
        try:
            socket.getaddrinfo(place.address, place.port)
        except (OSError, UnicodeError) as error:
            fix = "set it to the name or address of the host of rank 0"
            raise ConnectionError(f"rank {rank} cannot look up {address} ({_first(error)}): {fix}") from error
        try:
            return opened(rank == 0 and not place.agents_store)
        except RuntimeError as error:
            text = str(error)
            if "EADDRINUSE" not in text and "address already in use" not in text.lower():
                ask = f"is rank 0 running, and is this its address? ({_first(error)})"
                if loopback_only(place.address):
                    ask += f"; {address} is this host itself"
                raise ConnectionError(f"rank {rank} found no store at {where} within {deadline:g} s: {ask}") from error
        return opened(False)  # another rank 0, whom the meeting names, or another program

    silent = (
        f"rank {rank} waited {deadline:g} s for the store at {where}, whose holder accepts connections and does not "
        f"answer as a store: is rank 0 stopped, or is the port another program's?"
    )
    fix = "the port is in use. Set MASTER_PORT (torchrun --master-port) to a free one, or end the program that holds it"
    try:
        return within(deadline, reached)
    except TimeoutError as error:
        raise TimeoutError(silent) from error
    except RuntimeError as error:
        raise ConnectionError(f"rank {rank} cannot listen on {where}: {fix} ({_first(error)})") from error


@contextmanager
def _told(what: str, deadline: float) -> Iterator[None]:
    """Errors of torch, and a call that did not return, as errors that say ``what``."""
    try:
        yield
    except TimeoutError as error:
        if str(error):  # of the meeting
            raise
        raise TimeoutError(f"{what} within {deadline:g} s") from error
    except RuntimeError as error:
        raise ConnectionError(f"{what} ({_first(error)})") from error


def _first(error: BaseException) -> str:
    return one_line(str(error).splitlines()[0] if str(error) else repr(error), 300)


def _on_loopback() -> bool:
    """Whether gloo would listen on loopback, because this host's name leads there."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return False
    try:
        return within(RESOLVE_SECONDS, lambda: loopback_only(socket.gethostname()))
    except (OSError, UnicodeError):
        return False


def code_facts(read: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, str]:
    """What this process runs, as facts that must be the same on all ranks: torch, plait, and the program itself."""
    package = Path(__file__).parents[1]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    files = {"plait": sorted(package.rglob("*.py")), "the program": [Path(main)] if main else []}
    facts = {"torch": torch.__version__}
    for name, paths in files.items():
        digest = hashlib.blake2b(digest_size=6)
        for path in paths:
            try:
                digest.update(read(path))
            except OSError:  # in an archive, or gone since it was started
                continue
        facts[f"the code of {name}"] = digest.hexdigest()
    return facts
