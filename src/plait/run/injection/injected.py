"""A fault as an observer of the rank that it names: it counts steps and operations, prints the fault, and causes it.

    begin_step(19)  asked(count)  asked(all_gather ...) ──► here      "plait: injected kill on rank 2 in step 20, ..."

The message goes to the standard error before the fault happens, so that a measurement knows the moment.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from plait.comm.base import DONE, Comm, Operation, Work
from plait.comm.observer import Observer
from plait.comm.operation import Prepared
from plait.comm.thread import ThreadComm
from plait.messages.escape import say
from plait.run.injection.faults import Fault, parse_fault
from plait.step import Engine

LARGEST_FILE = 4096
"""Largest size of a file, in bytes, once the disk is full."""

SKIPPED = ("all_gather", "reduce_scatter", "all_reduce")

OF_OTHERS = ("skip-collective", "nan")
"""Faults of a collective or of the loss, which happen when those are made."""


def inject(engine: Engine, faults: Sequence[str | Fault]) -> None:
    """Injects faults, as in ``plait train --inject``, into a run.  Call it on every rank, after making (and loading)
    the engine.  ValueError, on every rank, if a fault is impossible, or is one of a whole process but ranks are
    threads."""
    comm, again = engine.comm, engine.comm.attempt > 0
    threads = isinstance(comm, ThreadComm)
    parsed = [f if isinstance(f, Fault) else parse_fault(f, comm.world_size, threads=threads) for f in faults]
    for fault in parsed:
        if fault.rank == comm.rank and (fault.always or not again):
            observer = Slowed(fault) if fault.kind == "slow" else Injected(fault, engine)
            comm.observers = (*comm.observers, observer)


class Injected(Observer):
    """A fault that happens once; ``now`` is true in its step, until it has happened."""

    def __init__(self, fault: Fault, engine: Engine) -> None:
        self.fault, self.engine = fault, engine
        self.now, self._asked, self._over = False, 0, False
        if fault.kind == "skip-collective":
            _leave_out(engine.comm, self)
        if fault.kind == "nan":
            _poison(engine, self)

    def begin_step(self, number: int) -> None:
        if self.now and self.fault.kind not in OF_OTHERS:
            self._act(None)  # the step had fewer operations
        self.now, self._asked = number + 1 == self.fault.step and not self._over, 0

    def asked(self, operation: Operation) -> None:
        if self.fault.kind not in OF_OTHERS and self.due():
            self._act(operation)

    def closed(self) -> None:
        if not self._over:
            self.now, self._over = False, True
            say(f"plait: {self.fault} was not injected: the run reached no such place\n")

    def due(self) -> bool:
        """True if the fault happens at the current operation."""
        if not self.now:
            return False
        self._asked += 1
        return self._asked >= self.fault.operation

    def say(self, operation: Operation | None) -> None:
        """Prints that the fault happens now, and marks it as done."""
        self.now, self._over = False, True
        where = f", in {operation}" if operation else ""
        say(f"plait: injected {self.fault} (process {os.getpid()}){where}\n")
        sys.stderr.flush()

    def _act(self, operation: Operation | None) -> None:
        self.say(operation)
        match self.fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "signal":
                os.kill(os.getpid(), int(self.fault.value))
            case "exit":
                os._exit(0)
            case "exception":
                raise RuntimeError(f"injected: {self.fault}")
            case "flip":
                _flip(self.engine)
            case "disk-full":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails instead of killing the process
                _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, most))


class Slowed(Observer):
    """Makes a rank take ``factor`` times as long for its own computation."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self._last = fault, 0.0

    def begin_step(self, number: int) -> None:
        if number + 1 >= self.fault.step and not self._last:
            say(f"plait: injected {self.fault}\n")
            self._last = time.perf_counter()
        self._take_longer()

    def asked(self, operation: Operation) -> None:
        self._take_longer()

    def waits(self, operation: Operation) -> None:
        self._take_longer()

    def waited(self, operation: Operation, start: float, end: float) -> None:
        if self._last:
            self._last = end

    def _take_longer(self) -> None:
        if self._last:
            time.sleep((self.fault.value - 1) * (time.perf_counter() - self._last))
            self._last = time.perf_counter()


def _leave_out(comm: Comm, injected: Injected) -> None:
    """Makes one collective of this rank return at once, without changing its tensors."""
    begin = comm.begin

    def left_out(prepared: Prepared) -> Work:
        operation = prepared.operation
        if operation.kind in SKIPPED and injected.due():
            injected.say(operation)
            return DONE
        return begin(prepared)

    comm.begin = left_out  # type: ignore[method-assign]


def _poison(engine: Engine, injected: Injected) -> None:
    """Makes this rank's first loss in the step NaN."""
    loss_fn, backward = engine.loss_fn, engine.backward

    def poisoned(loss: Any) -> Any:
        if not injected.now:
            return loss
        injected.say(None)
        return loss * float("nan")

    if loss_fn is not None:
        engine.loss_fn = lambda *args, **kwargs: poisoned(loss_fn(*args, **kwargs))
    engine.backward = lambda loss, *args, **kwargs: backward(poisoned(loss), *args, **kwargs)  # type: ignore


def _flip(engine: Engine) -> None:
    """Flips a high bit in the mantissa of this rank's first number."""
    views = [owned.view.detach() for owned in engine.placed.owned if owned.view.numel()]
    if not views:
        say("plait: the bit could not be injected: this rank has no parameter\n")
        return
    view = views[0]
    octets = view.view(-1)[:1].view(torch.uint8)
    octets[view.element_size() - 2] ^= 0x10
