"""Remote calls: a rank calls a function of another rank by name, with tensors, and gets the result or the error.

    remote = plait.remote.connect(comm, {"pull": pull, "push": push})     all ranks; each with the functions it offers
    weights = remote.call(0, "pull", step).result()
    remote.close()                                                        all ranks; until then each serves the others

Arguments and results are tensors, numbers, texts, bytes, None, dtypes, devices, and lists, tuples and dicts of them.
Tensors go directly from memory to memory, without their gradients.  torch.distributed.rpc carries the calls: it pickles
everything around the tensors, so the ranks of a job trust each other, and torch has announced its deprecation.
"""

from __future__ import annotations

import atexit
import os
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.comm.base import Comm
from plait.comm.process_identity import hosts_of
from plait.comm.texts import check_together
from plait.messages.escape import one_line
from plait.messages.wording import did_you_mean
from plait.table.mesh import AXES

if TYPE_CHECKING:
    from plait.torch_private import Store

Functions = Mapping[str, Callable[..., Any]]
Devices = Mapping[int, Mapping[str, str]]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
CARRIED = "tensors, numbers, texts, bytes, None, dtypes, devices, and lists, tuples and dicts of them"
CLOSING = "are you there, before you close?"
"""The name of a call that every rank answers."""
LOOK_SECONDS, ASK_SECONDS = 0.02, 1.0
"""While a rank closes: seconds between two looks at the others, and until it asks those that have not come."""

_served: dict[str, Callable[..., Any]] = {}
"""The functions that this process offers, by name; torch's agent only calls module-level functions."""
_stores: list[Store] = []
"""The store where the agents of this process meet, while they are connected."""


class RemoteError(RuntimeError):
    """A function failed on the rank that ran it.  The message ends with its traceback there."""

    def __init__(self, rank: int, name: str, kind: str, text: str, where: str) -> None:
        super().__init__(f"rank {rank} failed in '{name}': {kind}: {text}\n{where}")
        self.rank, self.name, self.kind, self.text = rank, name, kind, text


class RemoteCall:
    """A call under way."""

    def __init__(self, future: Any, rank: int, name: str, seconds: float) -> None:
        self.rank, self.name = rank, name
        self._future, self._seconds = future, seconds

    def done(self) -> bool:
        """True if ``result`` does not wait."""
        return bool(self._future.done())

    def result(self) -> Any:
        """Waits for the result.

        Raises:
            RemoteError: the function raised, or its result cannot be sent.
            ValueError: the rank offers no function of this name.
            TimeoutError: the rank did not answer in time.
            ConnectionError: the rank is gone, or the link to it is broken.
        """
        try:
            what, answer = self._future.wait()
        except RuntimeError as error:
            raise _lost(error, self.rank, self.name, self._seconds) from None
        if what == "unknown":
            names = ", ".join(answer) or "none"
            hint = did_you_mean(self.name, answer)
            raise ValueError(f"rank {self.rank} offers no function '{self.name}': {hint} It offers {names}")
        if what == "error":
            raise RemoteError(self.rank, self.name, *answer)
        return answer


class Remote:
    """The connection of this rank to the others; ``connect`` creates it."""

    def __init__(self, comm: Comm, store: Store, devices: Devices, deadline: float) -> None:
        self.rank, self.size, self.deadline = comm.rank, comm.mesh.size, deadline
        self._store, self._devices = store, devices
        self._calls: list[RemoteCall] = []
        self._closed = False

    def call(self, rank: int, name: str, *args: Any, timeout: float | None = None) -> RemoteCall:
        """Starts a function on a rank, which may be this one.

        Args:
            timeout: seconds after which ``result`` raises; the function itself is not stopped. None: the connection's.

        Raises:
            ValueError: there is no such rank, or an argument cannot be sent.
            ConnectionError: the rank is gone.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"a call to rank {rank}: the ranks are 0 to {self.size - 1}")
        seconds = self.deadline if timeout is None else timeout
        if not seconds > 0:
            raise ValueError(f"timeout is {seconds:g}: give seconds above 0")
        if self._closed:
            raise ValueError("remote is closed: no more calls can be made")
        there = self._devices.get(rank, {})
        sent = [sendable(one, there, f"argument {n} of '{name}' for rank {rank}") for n, one in enumerate(args)]
        self._calls = [one for one in self._calls if not one.done()]
        self._calls.append(self._start(rank, name, sent, list(there.values()), seconds))
        return self._calls[-1]

    def _start(self, rank: int, name: str, sent: list[Any], back: list[str], seconds: float) -> RemoteCall:
        from torch.distributed import rpc

        try:
            future = rpc.rpc_async(_worker(rank), _run, (name, sent, back), timeout=seconds)
        except RuntimeError as error:
            raise _lost(error, rank, name, seconds) from None
        return RemoteCall(future, rank, name, seconds)

    def close(self) -> None:
        """Serves the other ranks until all of them close; then no call is under way.

        Raises:
            ConnectionError, TimeoutError: a rank is gone, or silent, before it has closed.
        """
        if self._closed:
            return
        together = False
        try:
            for one in self._calls:
                with suppress(RuntimeError):  # its result raises the error
                    one._future.wait()
            self._store.set(_closes(self.rank), "1")
            for rank in range(self.size):
                self._await(rank)
            together = True
        finally:
            self._end(together)

    def _await(self, rank: int) -> None:
        """Waits until a rank closes, and asks it now and then to notice if it is gone."""
        asked = time.monotonic()
        while not self._store.check([_closes(rank)]):
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > asked + ASK_SECONDS:
                try:
                    self._start(rank, CLOSING, [], [], self.deadline).result()
                except (ConnectionError, TimeoutError):
                    if not self._store.check([_closes(rank)]):
                        raise
                asked = time.monotonic()

    def leave(self) -> None:
        """Ends only this rank's part, at the end of its process, which torch's threads would abort."""
        if not self._closed:
            self._end(False)

    def _end(self, together: bool) -> None:
        from torch.distributed import rpc

        self._closed = True
        atexit.unregister(self.leave)
        rpc.shutdown(graceful=together, timeout=max(1, round(self.deadline)))
        _served.clear()
        _stores.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()


def connect(
    comm: Comm, functions: Functions, *, devices: Devices | None = None, threads: int = 4, deadline: float | None = None
) -> Remote:
    """Connects the ranks; all of them call it.  From then on this rank runs ``functions`` for the others.

    Args:
        functions: the functions that others may call here, by name. They run in threads: guard shared data.
        devices: for each rank that gets GPU tensors, the device there for each device here, as in
            ``{1: {"cuda:0": "cuda:1"}}``; results come back the same way. CPUs need no entry.
        threads: the number of calls that this rank runs at a time.
        deadline: the seconds within which a call is answered; None: the deadline of ``comm``.

    Raises:
        ValueError: the ranks are not processes, or are connected already, or (from torch) a mapped device is missing.
        ConnectionError: torch's agents do not reach each other.
    """
    from torch.distributed import rpc

    store: Store | None = getattr(comm, "store", None)
    devices, seconds = devices or {}, deadline or comm.deadline
    if store is None:
        raise ValueError(
            "remote calls go between processes: start several, by torchrun or plait.join's other launchers"
        )
    wrong: Exception | None = None
    try:
        if _stores:
            raise ValueError("remote calls are connected here already: close them first")
        name = "plait://"
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=threads, rpc_timeout=seconds, init_method=name)
        for rank, there in devices.items():
            options.set_device_map(_worker(rank), dict(there))  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        wrong = error
    check_together(comm, wrong, AXES)
    _served.update(functions)
    before: Any = store.timeout  # type: ignore[attr-defined]
    _stores.append(dist.PrefixStore("remote calls", store))  # type: ignore[attr-defined]
    try:
        with _own_interface(getattr(comm, "peers", ())), _within(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch, about its own call
            rpc.init_rpc(_worker(comm.rank), rank=comm.rank, world_size=comm.mesh.size, rpc_backend_options=options)
    except BaseException as error:
        _served.clear()
        _stores.clear()
        if isinstance(error, RuntimeError):
            why = one_line(str(error).partition("\n")[0], 200)
            raise ConnectionError(
                f"rank {comm.rank} could not connect its remote calls within {seconds:g} s ({why}): if this process "
                f"has used torch's own RPC, some rank has begun it more often than another, and torch counts; connect "
                f"before that, or in new processes"
            ) from error
        raise
    finally:
        store.set_timeout(before)
    number = int(store.add(f"remote calls {comm.rank}", 1))
    remote = Remote(comm, dist.PrefixStore(f"remote calls {number}", store), devices, seconds)  # type: ignore[attr-defined]
    atexit.register(remote.leave)
    return remote


def sendable(value: Any, devices: Collection[str], where: str) -> Any:
    """Returns a value in the form that is sent: copies of tensors, without their gradients.

    Raises:
        ValueError: a part has another type, or a tensor is on a device that the map does not have.
    """
    if type(value) in (Tensor, nn.Parameter):
        if value.layout is not torch.strided:
            raise ValueError(f"{where} has the layout {value.layout}: send .to_dense()")
        if value.device.type != "cpu" and str(value.device) not in devices:
            raise ValueError(
                f"{where} is on {value.device}, and the device map has {', '.join(devices) or 'no device'} for that "
                f"rank: give connect(devices=...), or send .cpu()"
            )
        return value.detach().clone()  # torch reads it later, and the program may write to it
    if type(value) in (list, tuple):
        return type(value)(sendable(one, devices, f"{where}[{n}]") for n, one in enumerate(value))
    if type(value) is dict:
        return {_key(key, where): sendable(one, devices, f"{where}[{key!r}]") for key, one in value.items()}
    if type(value) in PLAIN:
        return value
    raise ValueError(f"{where} has type {one_line(type(value).__qualname__, 60)}: remote calls carry {CARRIED}")


def _key(key: Any, where: str) -> Any:
    if type(key) not in PLAIN:
        raise ValueError(f"a key of {where} has type {one_line(type(key).__qualname__, 60)}: give numbers or texts")
    return key


def _run(name: str, args: list[Any], back: list[str]) -> tuple[str, Any]:
    """Runs a function for another rank; ``back`` are the devices from which results may go."""
    if name == CLOSING:
        return "value", None
    if name not in _served:
        return "unknown", sorted(_served)
    try:
        return "value", sendable(_served[name](*args), back, f"the result of '{name}'")
    except BaseException as error:
        return "error", (type(error).__qualname__, str(error), traceback.format_exc())


def _lost(error: RuntimeError, rank: int, name: str, seconds: float) -> OSError:
    """Returns the error of a call without an answer; torch marks a time-out only by its text."""
    text = one_line(str(error).splitlines()[0] if str(error) else repr(error), 200)
    if "set timeout" in text:
        return TimeoutError(f"rank {rank} did not answer '{name}' within {seconds:g} s")
    return ConnectionError(f"rank {rank} is gone, or the link to it, during '{name}' ({text})")


def _worker(rank: int) -> str:
    return f"rank-{rank}"


def _closes(rank: int) -> str:
    return f"closes {rank}"


@contextmanager
def _own_interface(peers: Any) -> Iterator[None]:
    """Makes torch's agent listen where gloo does: on the job's interface, or on loopback if all ranks share a host."""
    name = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if len(hosts_of(peers)) == 1 else "")
    names = [one for one in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name and one not in os.environ]
    os.environ.update(dict.fromkeys(names, name))
    try:
        yield
    finally:
        for one in names:
            os.environ.pop(one, None)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Bounds the time that torch's agents wait for each other at the start: torch alone would wait 24 days."""
    from torch.distributed.rpc import constants

    before = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
    constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=seconds)
    try:
        yield
    finally:
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = before


def _meeting(_url: str, **_more: Any) -> Iterator[tuple[Store, int, int]]:
    """Gives torch the store that the ranks already have, by the scheme ``plait://``."""
    yield _stores[-1], -1, -1


dist.register_rendezvous_handler("plait", _meeting)  # type: ignore[attr-defined,no-untyped-call]
