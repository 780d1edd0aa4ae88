"""A place on a file system: checkpoints are folders that are complete or absent.

                 a folder of a file system (here)                    objects under a URL (``objects``)
    begun        .step-000123.9f3c.partial/rank-00000.safetensors    step-000123/rank-00000.9f3c.safetensors
    published    manifest flushed, then the folder renamed           manifest put last
    complete     once the folder has its name                        once the manifest exists
    left over    hidden folders                                      files of a save without a manifest

A run that ends before the rename changes nothing that existed.  A published folder is never written to again, and
the next save in the same place removes the files of an interrupted one.
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

from plait.checkpoint.files.reading import open_plain
from plait.checkpoint.manifest import NAME

LATEST = "latest"
"""A file with one line, the newest checkpoint's name, for scripts and people."""
STEP = re.compile(r"step-[0-9]{6,18}")
PARTIAL = re.compile(rf"\.{STEP.pattern}\.[0-9a-f]+\.partial")


@dataclass(frozen=True)
class Folder:
    """A file or folder of a file system; ``place / name`` is inside it."""

    path: Path

    gap = 1 << 16
    """Bytes that are cheaper to read than to skip."""
    chunk = 1 << 20
    """Bytes to read at a time."""
    pause = 0.02
    """Longest pause between two looks for other ranks' files, in seconds."""

    def __str__(self) -> str:
        return str(self.path)

    def given(self) -> Path:
        """The path as a user writes it."""
        return self.path

    @property
    def name(self) -> str:
        return self.path.name

    def home(self) -> tuple["Folder", str]:
        """The folder that contains it, with links resolved, and its name there."""
        real = self.path.resolve()
        return Folder(real.parent), real.name

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def names(self) -> list[str]:
        """Names in a folder; empty if there is no folder."""
        return os.listdir(self.path) if self.path.is_dir() else []

    @contextmanager
    def opened(self) -> Iterator["OpenFile"]:
        """Opens a plain file, without waiting; ValueError if it is missing, a link, a pipe, a device or a folder."""
        try:
            number, size = open_plain(self.path, links=False)
        except ValueError as error:
            raise ValueError(f"{str(self)!r} is no file that can be read: {error}") from error
        try:
            yield OpenFile(str(self), number, size)
        finally:
            os.close(number)

    @contextmanager
    def created(self) -> Iterator[BinaryIO]:
        """Opens a new file; the disk has it when the block ends, and an error in the block removes it."""
        with self.path.open("xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                self.path.unlink(missing_ok=True)
                raise

    def put(self, data: bytes) -> None:
        """Writes or replaces a small file atomically."""
        begun = self.path.with_name(f".{self.name}")
        begun.unlink(missing_ok=True)  # left by a run that ended here
        with Folder(begun).created() as file:
            file.write(data)
        begun.replace(self.path)

    def free(self) -> int | None:
        """Returns free bytes; None where they are unknown."""
        return shutil.disk_usage(next(folder for folder in self.path.absolute().parents if folder.exists())).free

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints in it, in any order; damaged ones too, for example without a manifest."""
        return [name for name in self.names() if STEP.fullmatch(name) and (self.path / name).is_dir()]

    def partial(self, folder: str, own: str) -> "Folder":
        """The place for the files of the save ``own`` until they are published as ``folder``."""
        return self / f".{folder}.{own}.partial"

    def file(self, rank: int, kind: str) -> "Folder":
        """A rank's file in a ``partial``; ``kind`` is its suffix."""
        return self / f"rank-{rank:05d}.{kind}"

    def begin(self, *, first: bool = True) -> None:
        """Creates a ``partial`` and removes those of other saves.

        The ``first`` save of a run also makes the folder around it.  Later a missing one (an unmounted disk) is an
        OSError.  ValueError if the checkpoint exists.
        """
        parent = self.path.parent
        if os.path.lexists(folder := self._published()):
            raise exists_already(Folder(folder))
        if first:
            parent.mkdir(parents=True, exist_ok=True)
        for left in filter(PARTIAL.fullmatch, os.listdir(parent)):
            with suppress(OSError):
                Folder(parent / left).discard()
        self.path.mkdir()

    def _published(self) -> Path:
        """The path that a ``partial`` will have."""
        return self.path.with_name(self.name.split(".")[1])

    def publish(self, manifest: str, files: Sequence[str]) -> "Folder":
        """Turns a ``partial`` into a checkpoint: adds the manifest and drops all but these ``files``.

        OSError if the checkpoint could not be published, or if only the line in ``latest`` could not be written.
        """
        parent, folder = self.path.parent, self._published()
        for name in set(self.names()) - set(files):
            (self.path / name).unlink()
        (self / NAME).put(manifest.encode())
        flush_folder(self.path)
        self.path.rename(folder)
        flush_folder(parent)
        Folder(parent / LATEST).put(f"{folder.name}\n".encode())
        flush_folder(parent)
        return Folder(folder)

    def discard(self) -> None:
        """Removes a checkpoint or a ``partial``, invisible from the first moment on.

        A writer that is still at work, or about to rename it, no longer finds it under its name.
        """
        step = STEP.search(self.name)
        assert step is not None
        hidden = self.path.with_name(f".{step[0]}.{secrets.token_hex(8)}.partial")
        self.path.rename(hidden)
        flush_folder(hidden.parent)
        shutil.rmtree(hidden, ignore_errors=True)


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


def flush_folder(path: Path) -> None:
    """Waits until the disk has a folder's entries."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def exists_already(place: object) -> ValueError:
    """The error for a checkpoint that exists."""
    return ValueError(
        f"{str(place)!r} exists already, and a checkpoint is never overwritten: save to another folder, or move this "
        f"one away"
    )
