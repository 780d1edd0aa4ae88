"""Who a rank is, as it says of itself when it comes; others read it as JSON of a fixed form."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from plait.core.escape import one_line

MOST_BYTES = 2**16
"""Of what a rank says of itself."""


@dataclass(frozen=True)
class Peer:
    """A rank as it says who it is."""

    rank: int
    host: str
    pid: int
    facts: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all ranks, by name."""
    loopback: bool = False
    """Its gloo would listen where no other host reaches it."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of this one meeting."""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {one_line(self.host, 80)}, process {self.pid})"

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """What ``text`` says; a ConnectionError if it was not written by a rank."""
        try:
            said = json.loads(text[:MOST_BYTES])
            peer = cls(**said)
            kinds = {"rank": int, "host": str, "pid": int, "facts": dict, "loopback": bool, "token": str}
            wrong = [name for name, kind in kinds.items() if not isinstance(getattr(peer, name), kind)]
            wrong += [name for pair in peer.facts.items() for name in pair if not isinstance(name, str)]
        except (ValueError, TypeError, RecursionError, AttributeError):
            wrong = ["all of it"]
        if wrong:
            raise ConnectionError(f"what the store has for a rank was not written by plait: '{shown(text)}'")
        return peer

    def may_live(self) -> bool:
        """Whether this process is still there, as far as this host can know."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return True


def shown(data: str | bytes) -> str:
    """The beginning of what somebody wrote who should not have."""
    return one_line(data if isinstance(data, str) else data.decode("ascii", "backslashreplace"), 60)
