"""What a file is known by: the digest of its parts' digests, so that any number of threads can take it, in any order.

    file      | 16 MiB | 16 MiB | rest |
    digests       d0       d1      d2        each by whichever thread is free
    digest      BLAKE3 of d0 d1 d2, end to end

The parts have a fixed size, so the digest does not say how many threads there were.  Earlier formats took a file as
one stream, which is the same with one part of any size, whose digest is the file's.

BLAKE3's own threads come from a pool that a fork leaves behind, where a second process would wait for them for ever;
those of here end with the call.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

PART = 1 << 24
"""Bytes of a part: few enough that the threads end together, and enough that starting them is nothing."""
MOST_THREADS = 8
"""A file system gives no more to more of them."""


@dataclass(frozen=True)
class Hash:
    """How a file's digest is made."""

    new: Callable[..., Any]
    """Of hashlib's kind."""
    part: int | None
    """Bytes; None for a file that is one stream."""

    def of(self, digests: Sequence[Any]) -> str:
        """The file's digest, given those of its parts."""
        if self.part is None:
            (only,) = digests
            return str(only.hexdigest())
        return str(self.new(b"".join(one.digest() for one in digests)).hexdigest())


HASHES: Mapping[str, Hash] = {
    "blake3 of 16 MiB parts": Hash(blake3, PART),
    "blake3": Hash(blake3, None),
    "sha256": Hash(hashlib.sha256, None),
}
"""What files are hashed with: the first one today, the second in format 2, the third in format 1."""
TODAY = next(iter(HASHES))


class Hasher:
    """Today's digest of bytes that come one after the other."""

    def __init__(self) -> None:
        self._hash = HASHES[TODAY]
        self._parts = [self._hash.new()]
        self._room = PART

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        left = memoryview(data).cast("B")
        while left:
            if not self._room:
                self._parts.append(self._hash.new())
                self._room = PART
            here, left = left[: self._room], left[self._room :]
            self._parts[-1].update(here)
            self._room -= len(here)

    def hexdigest(self) -> str:
        """Of all that came."""
        return self._hash.of(self._parts)


def digest_of(kind: str, size: int, chunk: int, threads: int, read: Callable[[int, memoryview], None]) -> str:
    """The digest of a file of ``size`` bytes.

    Args:
        kind: of ``HASHES``.
        chunk: bytes to read at a time.
        threads: at most so many read and hash, each its own part.
        read: fills a buffer with the bytes from a place on.
    """
    how = HASHES[kind]
    part = how.part or max(size, 1)

    def one(begin: int) -> Any:
        digest, end = how.new(), min(size, begin + part)
        buffer = memoryview(bytearray(min(chunk, end - begin)))
        for start in range(begin, end, chunk):
            here = buffer[: end - start]
            read(start, here)
            digest.update(here)
        return digest

    begins = range(0, max(size, 1), part)
    if min(threads, len(begins)) < 2:
        return how.of([one(begin) for begin in begins])
    with ThreadPoolExecutor(min(threads, len(begins)), "plait.hash") as pool:
        return how.of(list(pool.map(one, begins)))  # where one raises, those that have not begun do not


def threads_for(ranks: int) -> int:
    """How many threads each of so many processes of this machine may have without being in the others' way."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // ranks))
