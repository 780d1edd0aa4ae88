"""Digests of files, taken in parts of a fixed size.

file      | 16 MiB | 16 MiB | rest |
digests       d0       d1      d2
digest      BLAKE3 of d0 d1 d2, end to end
"""

from blake3 import blake3

PART = 1 << 24
"""The bytes of a part."""

HASH = "blake3 of 16 MiB parts"
"""The hash's name in a manifest."""


class Hasher:
    """Computes the digest of a stream of bytes."""

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
        return str(blake3(b"".join(one.digest() for one in self._parts)).hexdigest())
