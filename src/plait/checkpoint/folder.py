"""Checkpoints in a folder of a file system: each is complete or absent.

    begun        .step-000123.9f3c.partial/rank-00000.safetensors       locked
    published    manifest flushed, then the folder renamed
    complete     once the folder has its name
    left over    hidden folders

A run that ends before the rename changes nothing that existed.  A published folder is never written to again, and
the next save in the same place removes the files of an interrupted one.  An object store is mounted as a folder
(decision 149).
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from plait.checkpoint.files.reading import check_no_url, open_plain, read_file
from plait.checkpoint.files.writing import Lines
from plait.checkpoint.manifest import LARGEST, NAME, Manifest

LATEST = "latest"
"""A file with one line, the newest checkpoint's name, for scripts and people; it may lag by one."""
STEP = re.compile(r"step-[0-9]{6,18}")
LOCK = "lock"
"""A file in the folder of a running save, locked by the process that writes it."""
PARTIAL = re.compile(rf"\.{STEP.pattern}\.[0-9a-f]+\.partial")
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in the folder of a ``plait train`` run."""


def folder_at(path: str | Path) -> Path:
    """Returns the path; raises ValueError for a URL or a null byte."""
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no path: it has a null byte")
    check_no_url(path)
    return Path(path)


def find(path: str | Path) -> Path:
    """Finds the checkpoint at a path, or the newest in it, also in a run's folder; ValueError if there is none."""
    path = folder_at(path)
    if NAME in names(path):
        return path
    if others := all_of(path):
        return others[-1]
    if STEP.fullmatch(path.name):
        raise ValueError(f"{str(path / NAME)!r} is not there: {str(path)!r} is no whole checkpoint")
    raise ValueError(f"there is no checkpoint in {str(path)!r}: it has no folder {step_name(1)} or similar")


def all_of(path: str | Path) -> list[Path]:
    """All checkpoints in a folder and in its ``checkpoints``, the newest last."""
    path = folder_at(path)
    return sorted((*checkpoints(path), *checkpoints(path / CHECKPOINTS)), key=step_of)


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last; damaged ones too, for example without a manifest."""
    found = (path / name for name in names(path) if STEP.fullmatch(name))
    return sorted((folder for folder in found if folder.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def step_name(step: int) -> str:
    """A checkpoint's name."""
    return f"step-{step:06d}"


def names(folder: Path) -> list[str]:
    """Names in a folder; empty if there is no folder."""
    return os.listdir(folder) if folder.is_dir() else []


def read_manifest(folder: Path) -> bytes:
    """Reads the bytes of a checkpoint's manifest; raises ValueError if it is missing, a link, or no plain file."""
    return read_file(folder / NAME, "the manifest", LARGEST, links=False)


def parse_manifest(folder: Path, data: bytes) -> Manifest:
    """Parses a manifest; raises ValueError if it is damaged, or the folder's name has another step."""
    try:
        manifest = Manifest.parse(data.decode())
    except ValueError as error:
        raise ValueError(f"{str(folder / NAME)!r} is no manifest that plait wrote: {error}") from error
    if STEP.fullmatch(folder.name) and step_of(folder) != manifest.step:
        raise ValueError(
            f"{str(folder)!r} has step {manifest.step} in it, so it is a copy under another's name: call it "
            f"{step_name(manifest.step)}, or something that is no step"
        )
    return manifest


@dataclass(frozen=True)
class OpenFile:
    """A file by its descriptor."""

    path: str
    number: int
    size: int

    def read(self, start: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self.number, [into], start)
            if not count:
                raise OSError(f"{self.path!r} ends at byte {start}, and was longer when it was opened")
            start, into = start + count, into[count:]


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Opens a plain file, without waiting; raises ValueError if it is missing, a link, a pipe, a device or a folder."""
    try:
        number, size = open_plain(path, links=False)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no file that can be read: {error}") from error
    try:
        yield OpenFile(str(path), number, size)
    finally:
        os.close(number)


@contextmanager
def created(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file; the disk has it when the block ends, and an error in the block removes it."""
    with path.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def put(path: Path, data: bytes) -> None:
    """Writes or replaces a small file atomically."""
    begun = path.with_name(f".{path.name}")
    begun.unlink(missing_ok=True)  # left by a run that ended here
    with created(begun) as file:
        file.write(data)
    begun.replace(path)


def partial_of(path: Path, step: int, own: str) -> Path:
    """The folder for the files of the save ``own`` until they are published."""
    return path / f".{step_name(step)}.{own}.partial"


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """A rank's file; ``kind`` is its suffix."""
    return folder / f"rank-{rank:05d}.{kind}"


def begin(partial: Path, *, first: bool = True) -> Lines:
    """Creates the folder of a save, removes those of interrupted saves, and returns its lock.

    The ``first`` save of a run also creates the folder around it; later a missing one (an unmounted disk) is an
    OSError.  Raises ValueError if the checkpoint exists, or another save is under way.
    """
    parent = partial.parent
    if os.path.lexists(folder := _published(partial)):
        raise ValueError(
            f"{str(folder)!r} exists already, and a checkpoint is never overwritten: save to another folder, or move "
            f"this one away"
        )
    if first:
        parent.mkdir(parents=True, exist_ok=True)
    for left in filter(PARTIAL.fullmatch, os.listdir(parent)):
        with suppress(OSError):
            _check_left(parent / left)
            discard(parent / left)
    partial.mkdir()
    return Lines(partial / LOCK)


def _check_left(partial: Path) -> None:
    """Raises ValueError if the folder's save is under way."""
    try:
        Lines(partial / LOCK).close()
    except ValueError:
        raise ValueError(
            f"another run is saving to {str(partial.parent)!r}, {STEP.findall(partial.name)[0]}: give each run, and "
            f"each island of one, a separate folder"
        ) from None


def _published(partial: Path) -> Path:
    """The final path of a save's folder."""
    return partial.with_name(partial.name.split(".")[1])


def publish(partial: Path, manifest: str, files: Sequence[str]) -> Path:
    """Turns the folder of a save into a checkpoint: adds the manifest and drops all but these ``files``.

    Raises OSError if the checkpoint could not be published, or if just the line in ``latest`` could not be written.
    """
    parent, folder = partial.parent, _published(partial)
    for name in set(names(partial)) - set(files):
        (partial / name).unlink()
    put(partial / NAME, manifest.encode())
    flush_folder(partial)
    partial.rename(folder)
    flush_folder(parent)
    put(parent / LATEST, f"{folder.name}\n".encode())
    flush_folder(parent)
    return folder


def discard(folder: Path) -> None:
    """Removes a checkpoint or the folder of a save, which vanishes at once.

    A writer that is still at work, or about to rename the folder, no longer finds it under its name.
    """
    step = STEP.search(folder.name)
    assert step is not None
    hidden = folder.with_name(f".{step[0]}.{secrets.token_hex(8)}.partial")
    folder.rename(hidden)
    flush_folder(hidden.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def flush_folder(path: Path) -> None:
    """Waits until the disk has a folder's entries."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
