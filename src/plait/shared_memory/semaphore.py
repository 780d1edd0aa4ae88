"""The C library's semaphores, in memory that several processes share.

A process that waits on a semaphore sees everything that another process wrote before its ``post``, on every kind of
processor: POSIX promises it for ``sem_post`` and ``sem_wait`` (4.12, memory synchronization).  So no ordering of plain
stores is relied on, and nothing has to be compiled.

    post       one more; wakes a sleeper
    take       one less, if there is one; never sleeps
    wait       the same, but sleeps for a while; other threads of this process run meanwhile
"""

from __future__ import annotations

import ctypes
import time
from ctypes import c_int, c_long, c_uint, c_void_p

SIZE = 64
"""The bytes of a semaphore: glibc's have 32, musl's 32; each has a cache line to itself."""

_holding = ctypes.PyDLL(None)
_releasing = ctypes.CDLL(None)
"""Calls that may sleep let other threads run."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


_init, _post, _try, _value = _holding.sem_init, _holding.sem_post, _holding.sem_trywait, _holding.sem_getvalue
_init.argtypes, _post.argtypes, _try.argtypes = (c_void_p, c_int, c_uint), (c_void_p,), (c_void_p,)
_value.argtypes = (c_void_p, ctypes.POINTER(c_int))
_sleep = getattr(_releasing, "sem_clockwait", None)
if _sleep is not None:
    _sleep.argtypes = (c_void_p, c_int, ctypes.POINTER(_Time))

POLL_SECONDS = 0.0005
"""The seconds between two looks if the C library cannot sleep by the monotonic clock."""


class Semaphore:
    """A semaphore at an address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def begin(self, value: int = 0) -> None:
        """Initializes the semaphore, once, before others know of it."""
        if _init(self._address, 1, value):
            raise OSError("the C library makes no semaphores between processes here")

    @property
    def value(self) -> int:
        _value(self._address, found := c_int())
        return found.value

    def post(self) -> None:
        _post(self._address)

    def take(self) -> bool:
        code: int = _try(self._address)
        return code == 0

    def wait(self, seconds: float) -> bool:
        """Takes one; False if none came in time.  A signal may end the wait early."""
        end = time.monotonic() + seconds
        if _sleep is not None:
            whole = int(end)
            until = _Time(whole, int((end - whole) * 1e9))
            return int(_sleep(self._address, time.CLOCK_MONOTONIC, until)) == 0
        while not self.take():
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_SECONDS)
        return True
