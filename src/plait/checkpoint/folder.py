"""Folders that are whole or not there: how a checkpoint comes to lie on a disk, and how it is found again.

    DIR/.step-000123.9f3c.partial/     files as they are written, each flushed to the disk, then the manifest
    DIR/step-000123/                   renamed at the end: from now on it is there
    DIR/latest                         a line with its name, replaced as a whole, for scripts and people

Whatever ends a run before the rename leaves what was there before; a folder that is there is never written to again.
The newest is the one with the most steps: a run may end between the rename and the line.
"""

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from plait.checkpoint.manifest import LARGEST, NAME, Manifest, StoredFile

LATEST = "latest"
STEP = re.compile(r"step-[0-9]{6,18}")
PARTIAL = re.compile(rf"\.{STEP.pattern}\.[0-9a-f]+\.partial")
CHUNK = 1 << 20


def step_name(step: int) -> str:
    """A checkpoint's folder."""
    return f"step-{step:06d}"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read; ValueError for a link, a pipe, a device or a folder, none of which is waited for."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{str(path)!r} is no file that can be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError(f"{str(path)!r} is no plain file")
    with os.fdopen(number, "rb") as file:
        yield file


def read_manifest(folder: Path) -> str:
    """The text of a checkpoint's manifest, which can be parsed; ValueError for anything else."""
    path = folder / NAME
    with opened(path) as file:
        data = file.read(LARGEST + 1)
    try:
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        Manifest.parse(text := data.decode())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no manifest that plait wrote: {error}") from error
    return text


def check_file(path: Path, stored: StoredFile) -> None:
    """Raises ValueError where a file is not, byte for byte, the one that was written."""
    digest = hashlib.sha256()
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != stored.bytes:
            raise ValueError(f"{str(path)!r} has {size} bytes, and {stored.bytes} were written")
        for _ in range(-(-size // CHUNK)):
            digest.update(file.read(CHUNK))
    if digest.hexdigest() != stored.sha256:
        raise ValueError(f"{str(path)!r} is not what was written: its SHA-256 is another")


def find(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a folder of checkpoints.

    Raises:
        ValueError: there is none.
    """
    if os.path.lexists(path / NAME):
        return path
    if others := checkpoints(path):
        return others[-1]
    if STEP.fullmatch(path.name):
        raise ValueError(f"{str(path / NAME)!r} is not there: {str(path)!r} is no whole checkpoint")
    raise ValueError(f"there is no checkpoint in {str(path)!r}: it has no folder {step_name(1)} or the like")


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last; a damaged one is among them."""
    folders = path.iterdir() if path.is_dir() else ()
    found = [folder for folder in folders if STEP.fullmatch(folder.name) and folder.is_dir()]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix("step-")))


def begin(parent: Path, step: int, own: str) -> Path:
    """A new folder to write in, and what an earlier run has left unfinished is gone.

    Raises:
        ValueError: the checkpoint is there already.
    """
    if os.path.lexists(folder := parent / step_name(step)):
        raise ValueError(
            f"{str(folder)!r} exists already, and a checkpoint is never overwritten: save to another folder, or move "
            f"this one away"
        )
    parent.mkdir(parents=True, exist_ok=True)
    for left in [entry for entry in parent.iterdir() if PARTIAL.fullmatch(entry.name)]:
        with suppress(OSError):
            discard(left)
    partial = parent / f".{step_name(step)}.{own}.partial"
    partial.mkdir()
    return partial


def discard(folder: Path) -> None:
    """Take a checkpoint, or what was left unfinished, away at once; if it is not all gone the next ``begin`` goes on.

    Whoever still writes to it, or would rename it, finds nothing under its name.
    """
    step = STEP.search(folder.name)
    assert step is not None
    hidden = folder.with_name(f".{step[0]}.{secrets.token_hex(8)}.partial")
    folder.rename(hidden)
    flush_folder(folder.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def publish(partial: Path, manifest: Manifest) -> Path:
    """Everybody has written: add the manifest, and let the checkpoint be there, in the folder that is returned."""
    parent, name, text = partial.parent, step_name(manifest.step), manifest.text()
    Manifest.parse(text)  # what could not be read again is not written
    write_flushed(partial / NAME, text.encode())
    flush_folder(partial)
    partial.rename(parent / name)
    flush_folder(parent)
    pointer = parent / f".{LATEST}"
    pointer.unlink(missing_ok=True)  # of a run that ended here
    write_flushed(pointer, f"{name}\n".encode())
    pointer.replace(parent / LATEST)
    flush_folder(parent)
    return parent / name


def write_flushed(path: Path, data: bytes) -> None:
    """Write a new file, and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Wait until the disk has a folder's entries."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
