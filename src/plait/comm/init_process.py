"""How the ranks of a process world find each other: a store, a meeting in it, torch's process group.

    environment.py      who am I, and where is the store
    open_store          a file on one host; else torchrun's store, or that of rank 0
    store_rendezvous.py are we all here, each once, and alike
    process group       torch's own rendezvous, which reads addresses in the same store

All of it stands under one deadline.  Whatever is wrong is reported before the first operation.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plait.comm.deadline import clock, within
from plait.comm.environment import WorldVariables
from plait.comm.process_identity import Peer, born, shown
from plait.comm.store_rendezvous import UNKNOWN, Met, loopback_only, meet
from plait.messages.escape import one_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's stubs do not export them
_file_store: Any = dist.FileStore  # type: ignore[attr-defined]
_prefix_store: Any = dist.PrefixStore  # type: ignore[attr-defined]

RESOLVE_SECONDS = 2.0
"""How long the name of this host may take to be looked up; after it, it is taken for a good one."""
POLL_SECONDS = 0.05
LATE_SECONDS = 1.0
"""What a call that has a deadline of its own is given beyond it, before it is left behind."""
PACKAGE = Path(__file__).parents[1]


def init_process(
    place: WorldVariables, backend: Callable[[Sequence[Peer]], str], deadline: float, facts: dict[str, str]
) -> Met:
    """Meets the other ranks and makes torch's default process group.

    Args:
        backend: torch's, of a process group of these ranks; none is made where it is empty.
        facts: what must be the same on all ranks, by name, besides WORLD_SIZE.

    Raises:
        ConnectionError: the port is taken, or what answers there is no store.
        TimeoutError: some ranks did not come within the deadline; the message names them.
        ValueError: two processes have one rank, or ranks differ in a fact; the message names them.
    """
    end, rank = clock() + deadline, place.rank
    alike = {"WORLD_SIZE": str(place.size), **facts}
    mine = Peer(rank, socket.gethostname(), os.getpid(), alike, _on_loopback(), place.restarts)
    store = _prefix_store(f"job {place.job}", open_store(place, deadline))
    lost = f"rank {rank} lost the store at {place.where}"
    with _told(f"{lost}: its host is gone, stopped, or no store of torch", deadline, place.hint):
        left = max(0.0, end - clock())
        met = within(left + LATE_SECONDS, lambda: meet(store, mine, place.size, end))
    chosen = backend(met.peers)
    if not chosen:
        return met
    left = max(1.0, end - clock())
    with _told(f"rank {rank} met all {place.size} ranks but could not connect to them", deadline):
        options: dict[str, Any] = {"store": met.store, "rank": rank, "world_size": place.size}
        within(left + LATE_SECONDS, lambda: dist.init_process_group(chosen, timeout=timedelta(seconds=left), **options))
    return met


def open_store(place: WorldVariables, deadline: float) -> Store:
    """The store in which the ranks meet."""
    if place.file:
        return file_store(place.file, deadline)
    end, start = clock() + deadline, f"rank {place.rank}"

    def opened(host: bool) -> Store:
        patience = timedelta(seconds=max(1.0, end - clock()))
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": host}
        store: Store = _tcp_store(place.address, place.port, place.size, host, patience, **options)
        return store

    def reached() -> Store:
        if place.rank or place.agents_store:
            probe(place.address, place.port, end)
            return opened(False)
        try:
            return opened(True)
        except RuntimeError as error:
            if not _in_use(error):
                raise
            probe(place.address, place.port, clock() + 1)
            return opened(False)  # another rank 0, whom the meeting names

    try:
        return within(deadline + LATE_SECONDS, reached)
    except (socket.gaierror, UnicodeError) as error:
        name, fix = one_line(place.address, 100), "set it to the name or address of the host of rank 0"
        raise ConnectionError(f"{start} cannot look up MASTER_ADDR={name} ({_first(error)}): {fix}") from error
    except ConnectionRefusedError as error:
        here = f", and is {one_line(place.address, 100)}, which is this host, its address" if _is_here(place) else ""
        text = f"{start} found no store at {place.where} within {deadline:g} s: is rank 0 running{here}?"
        raise ConnectionError(f"{text} ({_first(error)})") from error
    except (RuntimeError, OSError) as error:
        if place.rank or place.agents_store:
            kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
            text = f"{start} found no store at {place.where} within {deadline:g} s: {_first(error)}"
            raise kind(f"{text}. Is rank 0 stopped, or is the port another program's?") from error
        fix = "Set MASTER_PORT (torchrun --master-port) to a free one, or end the program that holds it"
        in_use = _in_use(error) or (isinstance(error, OSError) and _is_known(place.address))
        used = f": the port is in use. {fix}" if in_use else ": is MASTER_ADDR the name or address of this host?"
        raise ConnectionError(f"{start} cannot listen on {place.where}{used} ({_first(error)})") from error


def _is_known(address: str) -> bool:
    """Whether a host of this name can be looked up."""
    try:
        return bool(socket.getaddrinfo(address, None))
    except (OSError, UnicodeError):
        return False


def _in_use(error: Exception) -> bool:
    return "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()


def file_store(path: str, deadline: float) -> Store:
    """A store in a file, for the processes of one host that may open it; who made its folder removes it.

    Raises:
        ConnectionError: its folder is gone, or there is no room in it.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # torch would look for its folder for 300 s
        store: Store = _file_store(path, -1)
    except (OSError, RuntimeError) as error:
        raise ConnectionError(f"the ranks cannot meet in a file of the temporary folder: {_first(error)}") from error
    store.set_timeout(timedelta(seconds=deadline))
    return store


VALIDATE, PING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d"
"""How a client of torch's TCPStore begins: a known number, and a number to be given back (TCPStore.cpp)."""


def probe(address: str, port: int, end: float) -> None:
    """Greets a port as torch's own client does, which would wait without a limit for a holder that is silent, and print
    its own stack for one that answers otherwise.

    Raises:
        ConnectionRefusedError, socket.gaierror, OSError: nobody listened there, nobody knew its name, or no way led
            there until ``end``, as of ``deadline.clock``.
        ConnectionError: until then the holder said nothing and closed, or it answers as no store does.
        TimeoutError: it does not answer.
    """
    while True:
        try:
            answered = _answer(address, port, end)
        except TimeoutError:
            raise
        except OSError:  # a store, a name and a route may come later than this rank
            if clock() + POLL_SECONDS >= end:
                raise
            time.sleep(POLL_SECONDS)
        else:
            break
    if answered:
        raise ConnectionError(f"the holder of the port answers '{shown(answered)}', as no store of torch does")


def _answer(address: str, port: int, end: float) -> bytes:
    """What is answered to the greeting, where that is not what a store answers."""
    try:
        peer = socket.create_connection((address, port), timeout=max(0.01, end - clock()))
    except TimeoutError as error:
        raise TimeoutError("nothing answers there") from error
    number, answer = secrets.token_bytes(4), b""
    with peer:
        try:
            peer.sendall(VALIDATE + PING + number)
            while len(answer) < 4:
                peer.settimeout(max(0.01, end - clock()))
                part = peer.recv(64)
                if not part:
                    break
                answer += part
        except TimeoutError as error:
            raise TimeoutError("the holder of the port accepts connections and is silent") from error
        except (ConnectionResetError, BrokenPipeError):
            pass  # as one that says nothing and closes
    if not answer:
        silent = "the holder of the port says nothing and closes the connection, as no store of torch does"
        raise ConnectionError(silent)
    return b"" if answer == number else answer


def _is_here(place: WorldVariables) -> bool:
    try:
        return within(RESOLVE_SECONDS, lambda: loopback_only(place.address))
    except (OSError, UnicodeError):
        return False


@contextmanager
def _told(what: str, deadline: float, hint: str = "") -> Iterator[None]:
    """Errors of torch, and a call that did not return, as errors that say ``what``."""
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{str(error) or f'{what} within {deadline:g} s'}{hint}") from error  # the meeting has words
    except RuntimeError as error:
        raise ConnectionError(f"{what} ({_first(error)})") from error


def _first(error: BaseException) -> str:
    return one_line(str(error).splitlines()[0] if str(error) else repr(error), 300)


def _on_loopback() -> bool:
    """Whether gloo would listen on loopback, because this host's name leads there or nowhere."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return False
    try:
        return within(RESOLVE_SECONDS, lambda: loopback_only(socket.gethostname()))
    except TimeoutError:
        return False
    except (OSError, UnicodeError):
        return True


def code_facts(read: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, str]:
    """What this process runs, as facts that must be the same on all ranks: torch, plait, and the program itself."""
    plait = sorted(PACKAGE.rglob("*.py"))
    codes = {"the code of plait": plait, "the code of the program": users_own(sys.modules.get("__main__"))}
    return {"torch": str(torch.__version__), **{name: _digest(files, read) for name, files in codes.items()}}


def users_own(main: object) -> list[Path]:
    """The source of a program, where it is the user's own.  One rank may run under a profiler, or by another
    installation's command."""
    file = getattr(main, "__file__", None)
    if not file or Path(file).suffix == ".pyc":
        return []
    kinds = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    paths = sysconfig.get_paths(), sysconfig.get_paths(sysconfig.get_preferred_scheme("user"))
    folders = [PACKAGE, Path(sys.executable).parent, *(Path(known[kind]) for known in paths for kind in kinds)]
    names = Path(file).absolute(), Path(file).resolve()
    return [] if any(name.is_relative_to(folder.absolute()) for name in names for folder in folders) else [names[0]]


def _digest(files: Sequence[Path], read: Callable[[Path], bytes]) -> str:
    """Of what these files hold, if that is what runs: they may lie in an archive, be gone, or newer than this
    process."""
    digest = hashlib.blake2b(digest_size=6)
    try:
        for file in files:
            digest.update(read(file))
            if file.stat().st_ctime > STARTED:
                return UNKNOWN
    except OSError:
        return UNKNOWN
    return digest.hexdigest() if files else UNKNOWN


def _started() -> float:
    """When this process began, by the clock of files; now, where the kernel does not say."""
    ticks = born(os.getpid())
    if not ticks:
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


STARTED = _started()
"""Known when this is imported: forks run what was read then."""
