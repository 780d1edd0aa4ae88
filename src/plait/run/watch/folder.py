"""The private folder in which the ranks of a host meet and write their status.  It goes with its last user.

    a launcher, or each rank under torchrun    ──►  a shared lock on its folder
    the maker of the next one                  ──►  removes those without a lock

All users of a folder may be killed at once, and then it stays until the next one is made.  The lock shows whether a
process still needs it, because the kernel takes the lock from a dead process; another process, container or host may
have a dead one's process id by now.  Where the file system has no such locks nothing is removed.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.messages.escape import one_line

PREFIX = "plait-ranks"

WATCH = "PLAIT_WATCH"
"""The variable that names the folder of a launcher, which then reports."""

TRIES = 100
"""Tries to make a folder that a sweeper removes before it is locked."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a new folder, which is removed after the block.

    Raises:
        ValueError, OSError: as ``locked_folder``.
    """
    folder, lock = locked_folder(f"{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make_again(folder: Path) -> None:
    """Makes a folder of ``private_folder`` again after it was removed; keeps its lock as long as this process lives.

    Raises:
        ValueError, OSError: as ``locked_folder``.
    """
    locked_folder(folder.name.removeprefix(f"{PREFIX}-{os.getuid()}-"))


def locked_folder(name: str) -> tuple[Path, int]:
    """Opens or makes the folder of this name, which only this user may enter, and returns it with the descriptor of its
    lock: it is not swept before that is closed, or this process is gone.

    Raises:
        ValueError: something else has its name, or another user owns or may enter it.
        OSError: the temporary folder is not there, full or not writable.
    """
    user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}-{user}-{name}"
    for _ in range(TRIES):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or stat.S_IMODE(found.st_mode) != 0o700:
                break
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(OSError):  # a file system without locks: nothing is swept there
                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists() and os.path.samestat(os.fstat(lock), folder.lstat()):
                _sweep()
                return folder, lock
            os.close(lock)  # a sweeper was here first
    raise ValueError(
        f"{one_line(str(folder))} is not a folder of user {user} with mode 700: "
        f"somebody else made it; set TMPDIR to a folder of your own"
    )


def _sweep() -> None:
    """Removes the folders of this user without a lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-{os.getuid()}-*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
