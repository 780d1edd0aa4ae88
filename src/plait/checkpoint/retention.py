"""Which checkpoints go: those beyond the newest few, once the newest one has been read back and is what was written.

    step-000100   step-000200   step-000300   step-000400      keep=2, step 400 has just been saved
    goes          pinned        kept          verified         (step-000500 of another run, or `best`: not looked at)

What goes is renamed to a hidden name first, so a run that is killed leaves a checkpoint whole or not there.
"""

from contextlib import suppress

from plait.checkpoint.folder import checkpoints, read_manifest, step_of
from plait.checkpoint.manifest import NAME
from plait.checkpoint.storage import Storage
from plait.checkpoint.stored import check_contents

PINNED = "pinned"
"""A file of this name in a checkpoint's folder: it stays."""


def remove_older(newest: Storage, keep: int) -> None:
    """Remove checkpoints of fewer steps than the newest one, until ``keep`` are left, itself included.

    Raises:
        ValueError: the newest one is not what was written; nothing has been removed.
    """
    home, name = newest.home()
    folders = checkpoints(home)
    older = [folder for folder in folders[: folders.index(home / name)] if _may_go(folder)]
    going = older[: max(0, len(older) - (keep - 1))]
    if not going:
        return
    try:
        manifest = read_manifest(newest)
        for name in manifest.files:
            check_contents(newest, name, manifest)
    except ValueError as error:
        raise ValueError(f"{str(newest)!r} has been saved, but {error}; no older checkpoint was removed") from error
    for folder in going:
        folder.discard()


def remove_left_over(place: Storage, step: int, keep: int) -> None:
    """Before a run's first save, of ``step``: remove what several runs have left that were ended behind a save, and
    before this.

    One more than ``keep`` stays, since the newest of them may be lost yet; so there are never more than two more,
    however often a run is killed.  Where the newest is damaged all stay, and the save decides.
    """
    earlier = [folder for folder in checkpoints(place) if step_of(folder) < step]
    if earlier:
        with suppress(ValueError):
            remove_older(earlier[-1], keep + 1)


def _may_go(folder: Storage) -> bool:
    names = folder.names()
    return folder.home()[1] == folder.name and NAME in names and PINNED not in names
