"""Removal of old checkpoints, once the newest one has been read back and has the right hashes.

    step-000100   step-000200   step-000300   step-000400      keep=2, step 400 has just been saved
    removed       pinned        kept          verified         (step-000500 of another run, or `best`: left alone)

A checkpoint is renamed to a hidden name first, so a kill leaves it complete or absent.
"""

from plait.checkpoint.manifest import NAME
from plait.checkpoint.places import Storage, checkpoints
from plait.checkpoint.stored import Checkpoint

PINNED = "pinned"
"""A checkpoint whose folder has a file of this name is never removed."""


def remove_older(newest: Storage, keep: int) -> None:
    """Removes checkpoints of fewer steps until ``keep`` are left, the newest included.

    Raises:
        ValueError: the newest one is damaged; nothing has been removed.
    """
    home, name = newest.home()
    folders = checkpoints(home)
    older = [folder for folder in folders[: folders.index(home / name)] if _may_go(folder)]
    going = older[: max(0, len(older) - (keep - 1))]
    if not going:
        return
    try:
        read = Checkpoint.find(newest)
        for file in read.manifest.files:
            read.check_file(file)
    except ValueError as error:
        raise ValueError(f"{str(newest)!r} has been saved, but {error}; no older checkpoint was removed") from error
    for folder in going:
        folder.discard()


def _may_go(folder: Storage) -> bool:
    names = folder.names()
    return folder.home()[1] == folder.name and NAME in names and PINNED not in names
