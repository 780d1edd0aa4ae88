"""Tries places to write to before a run.  A later error names the place, the bytes to write and the free bytes.

before the run    check_file, check_folder     a file is created there and removed
during it         Lines                        one write per line: it is there as a whole, or not at all
at its end        write_text                   written next to it, then renamed: never half a file

[Errno 28] No space left on device; need 812 bytes, have 0 bytes: 'runs/a/metrics.jsonl'
"""

import errno
import fcntl
import json
import math
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from plait.checkpoint.files.reading import check_no_url, shown
from plait.messages.escape import say


class DiskError(OSError):
    """A file that could not be written: the reason, the bytes that it needs and those that are free, and its path."""


def free(path: str | Path) -> int | None:
    """The bytes free for a user at a path, or where it would be created; None if the file system does not say."""
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


@contextmanager
def told(path: str | Path, need: int) -> Iterator[None]:
    """Turns an OSError of the disk inside into a DiskError with all facts in one line; another rank's error stays."""
    try:
        yield
    except OSError as error:
        if error.errno is None and isinstance(error, TimeoutError | ConnectionError):
            raise
        have = free(path)
        room = f"; need {need} bytes, have {have} bytes" if have is not None else ""
        raise DiskError(error.errno or errno.EIO, f"{error.strerror or error}{room}", str(path)) from error


def write_text(path: str | Path, text: str) -> None:
    """Writes a file with this text, or replaces one; on a DiskError the old file stays."""
    write_bytes(path, text.encode())


def write_json(path: str | None, data: Mapping[str, Any]) -> None:
    """Writes JSON to a file, to the standard output for ``-``, or nowhere for None; DiskError if the disk is full."""
    if path is None:
        return
    text = json.dumps(finite(data), indent=1, allow_nan=False) + "\n"
    if path == "-":
        say(text, sys.stdout)
    else:
        write_text(path, text)


def finite(value: Any) -> Any:
    """Replaces inf and NaN, which JSON cannot express, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def write_bytes(path: str | Path, data: bytes, *, lasting: bool = True) -> None:
    """Writes bytes in the same way as ``write_text``.

    Args:
        lasting: returns once the disk has them; otherwise a power cut may lose them, but not the end of the process.
    """
    target = Path(os.path.realpath(path))
    begun = target.with_name(f".{secrets.token_hex(8)}.partial")
    with told(path, len(data)):
        try:
            with begun.open("xb") as file:
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                file.write(data)
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            begun.replace(target)
        except BaseException:
            with suppress(OSError):
                begun.unlink()
            raise


class Lines:
    """A file to which one process at a time adds lines.  The lock ends with the process.

    Raises:
        DiskError: it cannot be opened.
        ValueError: another process is adding lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with told(path, 0):
            self.number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.number)
            raise ValueError(
                f"{shown(path)}: another run is writing to it; give each run its own folder (--out), or end that "
                f"run first"
            ) from None
        except OSError:
            pass  # a file system without locks
        _LOCKED.add(self)

    def read(self) -> bytes:
        """Returns the bytes of the file."""
        return os.pread(self.number, os.fstat(self.number).st_size, 0)

    def cut(self, size: int) -> None:
        """Drops everything except the first ``size`` bytes."""
        os.ftruncate(self.number, size)

    def write(self, line: str) -> None:
        """Adds a line by one write; DiskError for a line that does not fit, and then nothing of it stays."""
        data = f"{line}\n".encode()
        with told(self.path, len(data)):
            size = os.fstat(self.number).st_size
            if os.write(self.number, data) < len(data):
                self.cut(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self in _LOCKED:
            _LOCKED.remove(self)
            os.close(self.number)


_LOCKED: WeakSet[Lines] = WeakSet()


def _release() -> None:
    """Closes the descriptors in a fork, which would hold the locks beyond its parent's end."""
    for lines in list(_LOCKED):
        lines.close()


os.register_at_fork(after_in_child=_release)


def check_file(name: str, path: str) -> None:
    """Refuses a place where a file could not be written, before there is anything to write.

    Args:
        name: the name of the setting.

    Raises:
        ValueError: it is a folder, a pipe or a device, its folder is missing, or nothing can be written there.
    """
    check_no_url(path, name)
    _check_plain(name, path)
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"{name} {shown(path)}: there is no such folder; make it, or give another")
    _try(name, path, os.path.dirname(os.path.realpath(path)))  # where write_text puts it


def check_folder(name: str, path: str, files: Iterable[str] = (), need: int = 0) -> None:
    """Refuses a folder that could not be made, or written to.

    Args:
        name: the name of the setting.
        files: names of the files that will be written in it.
        need: the fewest bytes that will be written.

    Raises:
        ValueError: something else is there, nothing can be written, or there is too little room.
    """
    check_no_url(path, name)
    place = os.path.abspath(path)
    while not _there(name, place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise ValueError(f"{name} {shown(path)}: {shown(place)} is no folder; give another place")
    for file in files:
        _check_plain(name, os.path.join(path, file))
    _try(name, path, place)
    if (have := free(place)) is not None and need > have:
        raise ValueError(
            f"{name} {shown(path)}: need {need:,} bytes, have {have:,} bytes; give another place, or make room"
        )


def _there(name: str, place: str) -> bool:
    try:
        os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} {shown(place)}: {getattr(error, 'strerror', error)}; give another place") from error
    return True


def _check_plain(name: str, place: str) -> None:
    if _there(name, place) and not (os.path.isfile(place) and os.access(place, os.W_OK)):
        raise ValueError(f"{name} {shown(place)} is no plain file that can be written: give another place")


def _try(name: str, path: str, folder: str) -> None:
    """Writes a byte into a nameless file in the folder: root may write where the system still refuses."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
            file.flush()
    except OSError as error:
        have = free(folder)
        room = "" if have is None else f", {have} bytes are free"
        reason = f"nothing can be written in {shown(folder)} ({error.strerror}{room})"
        raise ValueError(f"{name} {shown(path)}: {reason}; give another place") from error
