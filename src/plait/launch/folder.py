"""The private folder of a launch: where its ranks meet and say what they do.  It is gone with its launcher.

A launcher that is killed cannot remove it, so the next one does.  Whether its owner lives is told by a lock on the
folder, which the kernel takes away from a dead process: no process id, which another may have by now.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "plait-launch-"
"""Of the names of such folders, with the launcher's process id behind it."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can enter (0700); those of dead launchers are removed."""
    sweep()
    begun = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{os.getpid()}-"))  # its name without the dot when it is locked
    lock = os.open(begun, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = begun.rename(begun.with_name(begun.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def sweep() -> None:
    """Removes the folders of launchers of this user that are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
