"""The key by which the hosts of a run know each other: 16 bytes or more, from a variable or a file that only its owner
may read.  It is never logged, and no error shows it.

    PLAIT_KEY_FILE=~/.plait-key     head -c 32 /dev/urandom | base64 > ~/.plait-key; chmod 600 ~/.plait-key
    PLAIT_KEY=...                   the key itself; the file is better, because other programs may see variables
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.messages.escape import one_line

SHORTEST, LONGEST = 16, 4096
"""Bytes of a key."""


@dataclass(frozen=True)
class ChannelKey:
    """A secret that does not show itself."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not SHORTEST <= len(self.secret) <= LONGEST:
            size = len(self.secret)
            raise ValueError(
                f"the key has {size} bytes; it needs {SHORTEST} to {LONGEST}: head -c 32 /dev/urandom | base64"
            )


def read_key(environment: Mapping[str, str] = os.environ) -> ChannelKey | None:
    """The key that the environment names; None where it names none.

    Raises:
        ValueError: the file is not there, is no plain file, may be read by others, or the key is too short or long.
    """
    if path := environment.get("PLAIT_KEY_FILE"):
        return ChannelKey(_file(path).strip())
    if text := environment.get("PLAIT_KEY"):
        return ChannelKey(text.strip().encode(errors="surrogateescape"))
    return None


def _file(path: str) -> bytes:
    name = f"PLAIT_KEY_FILE={one_line(path, 300)}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{name} is no plain file")
        if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
            mode = stat.S_IMODE(found.st_mode)
            raise ValueError(f"{name} has mode {mode:04o} and owner {found.st_uid}: others can read it; chmod 600 it")
        return os.read(fd, LONGEST + 2)
    finally:
        os.close(fd)
