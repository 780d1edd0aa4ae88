"""Checks that all hosts see the same folder, before hours of work are lost.

rank 0       .common-9f3c...     made        ...        removed
the others                       seen?   ◄── each reports it to all
"""

import secrets
from contextlib import suppress
from pathlib import Path

from plait.checkpoint.load import together
from plait.comm.base import Comm
from plait.comm.texts import broadcast_text
from plait.messages.escape import one_line
from plait.table.collectives import Note


def check_same_folder(folder: Path, comm: Comm) -> None:
    """Does nothing on one host.  All ranks call it together, and rank 0 can write to the folder.

    Raises:
        ValueError: this rank's host has a different folder there.
        RuntimeError: another rank's error.
    """
    if len({peer.host for peer in comm.peers}) < 2:
        return
    mark = folder / broadcast_text(comm, f".common-{secrets.token_hex(8)}", Note("state"))
    try:
        with together(comm):
            if not comm.rank:
                mark.touch()
        with together(comm):
            if not mark.exists():
                host = {peer.rank: one_line(peer.host, 80) for peer in comm.peers}
                raise ValueError(
                    f"{str(folder)!r} on host {host[comm.rank]} is not the folder that rank 0 writes to on host "
                    f"{host[0]}: checkpoints need one that all hosts share"
                )
    finally:
        if not comm.rank:
            with suppress(OSError):
                mark.unlink()
