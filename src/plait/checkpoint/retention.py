"""Removal of old checkpoints, once the newest one has been read back and has the right hashes.

    step-000100   step-000200   step-000300   step-000400      keep=2, step 400 has just been saved
    removed       pinned        kept          verified         (step-000500 of another run, or `best`: left alone)

A checkpoint is renamed to a hidden name first, so a kill leaves it complete or absent.
"""

from pathlib import Path

from plait.checkpoint.folder import checkpoints, discard, names
from plait.checkpoint.manifest import NAME
from plait.checkpoint.stored import Checkpoint

PINNED = "pinned"
"""A checkpoint whose folder has a file of this name is never removed."""


def remove_older(newest: Path, keep: int) -> None:
    """Removes checkpoints of fewer steps until ``keep`` are left, the newest included.  ValueError, and nothing
    removed, if the newest one is damaged."""
    newest = newest.resolve()
    folders = checkpoints(newest.parent)
    older = [folder for folder in folders[: folders.index(newest)] if _may_go(folder)]
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
        discard(folder)


def _may_go(folder: Path) -> bool:
    there = names(folder)
    return not folder.is_symlink() and NAME in there and PINNED not in there
