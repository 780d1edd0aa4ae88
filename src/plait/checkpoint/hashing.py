"""Digests of files, taken part by part, so that any number of threads can share a file.

    file      | 16 MiB | 16 MiB | rest |
    digests       d0       d1      d2        each taken by any free thread
    digest      BLAKE3 of d0 d1 d2, end to end

The parts have a fixed size, so the digest does not depend on the number of threads.  BLAKE3's own threads
would survive a fork as a pool that no longer works, so each call here starts its own.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from blake3 import blake3

PART = 1 << 24
"""Bytes of a part: small enough for even work, large enough to hide the cost of a thread."""
MOST_THREADS = 8
"""File systems gain nothing from more."""


HASH = "blake3 of 16 MiB parts"
"""The hash's name in a manifest."""


def _joined(digests: Sequence[Any]) -> str:
    """The file's digest from its parts' digests."""
    return str(blake3(b"".join(one.digest() for one in digests)).hexdigest())


class Hasher:
    """The digest of a stream of bytes."""

    def __init__(self) -> None:
        self._parts = [blake3()]
        self._room = PART

    def update(self, data: bytes | memoryview) -> None:
        """Adds bytes."""
        left = memoryview(data).cast("B")
        while left:
            if not self._room:
                self._parts.append(blake3())
                self._room = PART
            here, left = left[: self._room], left[self._room :]
            self._parts[-1].update(here)
            self._room -= len(here)

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        return _joined(self._parts)


def digest_of(size: int, chunk: int, threads: int, read: Callable[[int, memoryview], None]) -> str:
    """Hashes a file of ``size`` bytes in at most ``threads`` threads.

    Args:
        chunk: bytes to read at a time.
        read: fills a buffer with the bytes from a position on.
    """

    def one(begin: int) -> Any:
        digest, end = blake3(), min(size, begin + PART)
        buffer = memoryview(bytearray(min(chunk, end - begin)))
        for start in range(begin, end, chunk):
            here = buffer[: end - start]
            read(start, here)
            digest.update(here)
        return digest

    begins = range(0, max(size, 1), PART)
    if min(threads, len(begins)) < 2:
        return _joined([one(begin) for begin in begins])
    with ThreadPoolExecutor(min(threads, len(begins)), "plait.hash") as pool:
        return _joined(list(pool.map(one, begins)))  # an error cancels the parts that have not begun


def threads_for(ranks: int) -> int:
    """Threads for each of ``ranks`` processes on this machine, so that they share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // ranks))
