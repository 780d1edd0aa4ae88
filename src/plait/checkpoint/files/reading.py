"""Reads files from outside in one way: only plain files, of a bounded size for each kind.

regular file, or a link to one      its bytes, up to a limit
pipe, device, socket, folder        refused at once, without waiting for a writer
missing, a loop of links            refused, in the words of the system
"""

import os
import resource
import stat
from contextlib import suppress
from pathlib import Path

LARGEST_TEXT = 1 << 24
"""The most bytes of a file that a person writes: settings, a schedule, a job."""


LONGEST_SHOWN = 400


def shown(path: str | Path) -> str:
    """Returns a path for a message: as Python writes it, without its middle if it is long."""
    text = repr(str(path))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:100]}...{text[-100:]}"


def check_no_url(path: str | Path, name: str = "") -> None:
    """Raises ValueError for a URL: files are in folders, and an object store is mounted as one."""
    if isinstance(path, str) and "://" in path:
        text = f"{name} {shown(path)} is a URL: mount the object store (rclone mount, s3fs), and give the path there"
        raise ValueError(text.lstrip())


def open_plain(path: str | Path, *, links: bool = True) -> tuple[int, int]:
    """Opens a plain file to be read, without waiting; returns (file number, size in bytes).

    Args:
        links: True to follow a link.

    Raises:
        ValueError: with the reason; the caller adds the file's purpose.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW))
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL
        raise ValueError(error.strerror if isinstance(error, OSError) else str(error)) from error
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise ValueError("it is no plain file")
    return number, status.st_size


def read_file(path: str | Path, what: str, most: int = LARGEST_TEXT, *, links: bool = True) -> bytes:
    """Reads all bytes of a plain file.

    Args:
        what: the file's name in messages: ``the config``.
        most: the most bytes that the file may have.
        links: True to follow a link.

    Raises:
        ValueError: the file is missing, is not a plain file, has more bytes, or the system refuses.
    """
    try:
        number, size = open_plain(path, links=links)
        with open(number, "rb") as file:
            data = b"" if size > most else file.read(size)
            if not size:  # files of the kernel give 0 as their size
                data = file.read(min(most, LARGEST_TEXT) + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {what} {shown(path)}: {reason}") from error
    if max(size, len(data)) > most:
        raise ValueError(f"cannot read {what} {shown(path)}: it has more than {most:,} bytes")
    return data


def check_readable(path: str | Path, what: str, most: int = LARGEST_TEXT) -> None:
    """Raises the errors of ``read_file``, without reading."""
    try:
        number, size = open_plain(path)
        os.close(number)
    except ValueError as error:
        raise ValueError(f"cannot read {what} {shown(path)}: {error}") from error
    if size > most:
        raise ValueError(f"cannot read {what} {shown(path)}: it has more than {most:,} bytes")


def read_text(path: str | Path, what: str, most: int = LARGEST_TEXT) -> str:
    """Reads the file as UTF-8; raises ValueError if it is not UTF-8."""
    try:
        return read_file(path, what, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {what} {shown(path)}: it is no UTF-8 text ({error})") from error


def memory(processes: int = 1) -> int:
    """Returns the bytes that this many processes could ever have together: the machine's, its cgroup's, or those of
    their limits; swap comes on top."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _swap() + min(found + [processes * limit] * (limit != resource.RLIM_INFINITY))


def _swap() -> int:
    with suppress(OSError, ValueError, IndexError):
        return 1024 * int(Path("/proc/meminfo").read_text().partition("SwapTotal:")[2].split()[0])
    return 0
