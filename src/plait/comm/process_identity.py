"""A rank's process, as it describes itself to the others, and the hosts of a world.

Others read it as JSON of a fixed form; a store is not authenticated.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from plait.messages.escape import one_line
from plait.table.mesh import Mesh

Said = TypeVar("Said")

MOST_BYTES = 2**24
"""The most bytes of a text in the store that are parsed."""


@cache
def token_of(pid: int) -> str:
    """Tells this process apart from all others and from its forks: containers may share host names and process ids."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Peer:
    """The process of one rank."""

    rank: int
    host: str
    pid: int
    facts: dict[str, str] = field(default_factory=dict)
    """Facts that must be the same on all ranks, by name."""
    restarts: int = 0
    """Earlier starts of the ranks, as far as this one knows; launchers of one world may count differently."""
    token: str = field(default_factory=lambda: token_of(os.getpid()))

    def __str__(self) -> str:
        return f"rank {self.rank} (host {one_line(self.host, 80)}, process {self.pid})"

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Reads ``text``; raises ConnectionError if no rank wrote it."""
        return from_json(cls, text)


def from_json(kind: type[Said], text: str | bytes) -> Said:
    """Returns a dataclass from JSON with exactly its fields, of their types.

    Raises:
        ConnectionError: plait did not write it.
    """
    try:
        said, hints = json.loads(text[:MOST_BYTES]), get_type_hints(kind)
        if said.keys() == hints.keys() and all(_fits(said[name], hint) for name, hint in hints.items()):
            return kind(**said)
    except (ValueError, RecursionError, AttributeError):
        pass
    raise ConnectionError(f"the text in the store was not written by plait: '{shown(text)}'")


def _fits(value: Any, hint: Any) -> bool:
    kind, inside = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in inside
    if kind not in (list, dict):
        return isinstance(value, hint)
    if not isinstance(value, kind):
        return False
    parts: list[object] = [*value, *value.values()] if isinstance(value, dict) else list(value)
    return all(_fits(part, inside[0]) for part in parts)


def shown(data: str | bytes) -> str:
    """The beginning of a text that plait did not write, escaped."""
    return one_line(data if isinstance(data, str) else data.decode("ascii", "backslashreplace"), 60)


def hosts_of(peers: Sequence[Peer]) -> list[str]:
    """The hosts of a world, with rank 0's host first."""
    return list(dict.fromkeys(peer.host for peer in sorted(peers, key=lambda peer: peer.rank)))


def on_hosts(mesh: Mesh, peers: Sequence[Peer]) -> Mesh:
    """Adds the ranks' hosts to a mesh, if each has equally many ranks, one host after the other.

    Raises:
        ValueError: the mesh has another number of hosts.
    """
    names, runs = hosts_of(peers), [len(list(run)) for _, run in groupby(peers, key=lambda peer: peer.host)]
    if mesh.hosts > 1 and len(names) not in (1, mesh.hosts):
        raise ValueError(f"the mesh says hosts={mesh.hosts}, and its ranks are on {len(names)} hosts: leave hosts out")
    if mesh.hosts == 1 and len(names) == len(runs) and len(set(runs)) == 1:
        return replace(mesh, hosts=len(runs))
    return mesh
