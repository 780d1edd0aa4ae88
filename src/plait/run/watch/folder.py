"""The private folder in which the ranks of a host meet and write their status.  It goes with its last user.

If all its users are killed at once it stays in the temporary folder.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from plait.messages.escape import one_line

PREFIX = "plait-ranks"

WATCH = "PLAIT_WATCH"
"""The variable that names the folder of a launcher, which then reports."""


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a new folder, which only this user may enter; a context manager that removes it.  OSError if the temporary
    folder is missing, full or not writable."""
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}-", ignore_cleanup_errors=True)


def shared_folder(name: str) -> Path:
    """Opens or makes the folder of this name, which only this user may enter.

    Raises:
        ValueError: something else has its name, or another user owns or may enter it.
        OSError: the temporary folder is not there, full or not writable.
    """
    user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}-{user}-{name}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and stat.S_IMODE(found.st_mode) == 0o700:
        return folder
    raise ValueError(
        f"{one_line(str(folder))} is not a folder of user {user} with mode 700: "
        f"somebody else made it; set TMPDIR to a folder of your own"
    )
