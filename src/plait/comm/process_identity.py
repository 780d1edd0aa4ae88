"""Who a rank is, as it says of itself when it comes; others read it as JSON of a fixed form."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Self

from plait.messages.escape import one_line
from plait.table.mesh import Mesh

MOST_BYTES = 2**16
"""Of what a rank says of itself."""


@cache
def token_of(pid: int) -> str:
    """What tells this process from all others, forks of it too: containers may share host names and process ids."""
    return secrets.token_hex(8)


def born(pid: int) -> int:
    """When a process of this host was started, in ticks of the kernel; 0 where there is none, or nobody knows."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


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
    restarts: int = 0
    """How often ranks were started before, as far as it knows; launchers of one world may say different numbers."""
    token: str = field(default_factory=lambda: token_of(os.getpid()))
    """Of this one process."""
    born: int = field(default_factory=lambda: born(os.getpid()))

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
            kinds = {"rank": int, "host": str, "pid": int, "facts": dict, "loopback": bool}
            kinds |= {"restarts": int, "token": str, "born": int}
            wrong = [name for name, kind in kinds.items() if not isinstance(getattr(peer, name), kind)]
            wrong += [name for pair in peer.facts.items() for name in pair if not isinstance(name, str)]
        except (ValueError, TypeError, RecursionError, AttributeError):
            wrong = ["all of it"]
        if wrong:
            raise ConnectionError(f"what the store has for a rank was not written by plait: '{shown(text)}'")
        return peer

    def is_another_here(self, mine: Peer) -> bool:
        """Whether this is another process than mine, on this host, and still runs; other hosts are not seen."""
        same_host = self.host == mine.host == socket.gethostname()
        return self.token != mine.token and same_host and self.born == born(self.pid) != 0


def shown(data: str | bytes) -> str:
    """The beginning of what somebody wrote who should not have."""
    return one_line(data if isinstance(data, str) else data.decode("ascii", "backslashreplace"), 60)


def hosts_of(peers: Sequence[Peer]) -> list[str]:
    """The hosts of a world, that of rank 0 first."""
    return list(dict.fromkeys(peer.host for peer in sorted(peers, key=lambda peer: peer.rank)))


def on_hosts(mesh: Mesh, peers: Sequence[Peer]) -> Mesh:
    """Adds the hosts of its ranks to a mesh, if each has equally many, one host after the other.

    Raises:
        ValueError: the mesh gives another number of hosts.
    """
    names, runs = hosts_of(peers), [(host, len(list(run))) for host, run in groupby(peers, key=lambda peer: peer.host)]
    if mesh.hosts > 1 and len(names) not in (1, mesh.hosts):
        raise ValueError(f"the mesh says hosts={mesh.hosts}, and its ranks are on {len(names)} hosts: leave hosts out")
    if mesh.hosts == 1 and len(names) == len(runs) and len({size for _, size in runs}) == 1:
        return replace(mesh, hosts=len(runs))
    return mesh
