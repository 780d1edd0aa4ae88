"""Folders that are whole or not there: how a checkpoint comes to lie on a disk, and how it is found again.

    DIR/.step-000123.9f3c.partial/     files as they are written, each flushed to the disk, then the manifest
    DIR/step-000123/                   renamed at the end: from now on it is there
    DIR/latest                         a line with its name, replaced as a whole, for scripts and people

Whatever ends a run before the rename leaves what was there before; a folder that is there is never written to again.
The newest is the one with the most steps: a run may end between the rename and the line.
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
from plait.checkpoint.hashing import digest_of
from plait.checkpoint.manifest import LARGEST, NAME, Manifest, StoredFile
from plait.checkpoint.storage import LATEST, Storage, exists_already

CHECKPOINTS = "checkpoints"
"""Where ``plait train`` keeps them, in a run's folder."""
STEP = re.compile(r"step-[0-9]{6,18}")
PARTIAL = re.compile(rf"\.{STEP.pattern}\.[0-9a-f]+\.partial")


def place(path: str | Path | Storage) -> Storage:
    """What a path means: a URL, as ``s3://bucket/run``, is a place of fsspec; anything else is a folder.

    Raises:
        ValueError: what a URL needs is not installed, the URL is not understood, or the path is none.
    """
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no path: it has a null byte")
    if isinstance(path, str) and "://" in path:
        from plait.checkpoint.objects import place_of

        return place_of(path)
    return path if isinstance(path, Storage) else Folder(Path(path))


@dataclass(frozen=True)
class Folder(Storage):
    """A file or folder of a file system."""

    path: Path

    gap = 1 << 16
    chunk = 1 << 20
    pause = 0.02

    def __str__(self) -> str:
        return str(self.path)

    def given(self) -> Path:
        return self.path

    @property
    def name(self) -> str:
        return self.path.name

    def home(self) -> tuple["Folder", str]:
        real = self.path.resolve()
        return Folder(real.parent), real.name

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def names(self) -> list[str]:
        return os.listdir(self.path) if self.path.is_dir() else []

    @contextmanager
    def opened(self) -> Iterator["OpenFile"]:
        """Nothing is waited for and no link is followed."""
        try:
            number, size = open_plain(self.path, links=False)
        except ValueError as error:
            gone = removed(Folder(self.path.parent))
            raise ValueError(gone or f"{str(self)!r} is no file that can be read: {error}") from error
        try:
            yield OpenFile(str(self), number, size)
        finally:
            os.close(number)

    @contextmanager
    def created(self) -> Iterator[BinaryIO]:
        """When the block ends, the disk has it; where it ends in an error, nothing is left of it."""
        with self.path.open("xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                self.path.unlink(missing_ok=True)
                raise

    def put(self, data: bytes) -> None:
        begun = self.path.with_name(f".{self.name}")
        begun.unlink(missing_ok=True)  # of a run that ended here
        with Folder(begun).created() as file:
            file.write(data)
        begun.replace(self.path)

    def free(self) -> int | None:
        return shutil.disk_usage(next(folder for folder in self.path.absolute().parents if folder.exists())).free

    def checkpoints(self) -> list[str]:
        """A damaged one is among them, without a manifest say."""
        return [name for name in self.names() if STEP.fullmatch(name) and (self.path / name).is_dir()]

    def partial(self, folder: str, own: str) -> "Folder":
        return self / f".{folder}.{own}.partial"

    def file(self, rank: int, kind: str) -> "Folder":
        return self / f"rank-{rank:05d}.{kind}"

    def begin(self, *, first: bool = True) -> None:
        parent = self.path.parent
        if os.path.lexists(folder := self._published()):
            raise exists_already(Folder(folder))
        if first:
            parent.mkdir(parents=True, exist_ok=True)
        for left in [name for name in os.listdir(parent) if PARTIAL.fullmatch(name)]:
            with suppress(OSError):
                Folder(parent / left).discard()
        self.path.mkdir()

    def _published(self) -> Path:
        """What a ``partial`` will be."""
        return self.path.with_name(self.name.split(".")[1])

    def publish(self, manifest: str, files: Sequence[str]) -> "Folder":
        parent, folder = self.path.parent, self._published()
        for name in self.names():
            if name not in files:
                (self.path / name).unlink()
        (self / NAME).put(manifest.encode())
        flush_folder(self.path)
        self.path.rename(folder)
        flush_folder(parent)
        Folder(parent / LATEST).put(f"{folder.name}\n".encode())
        flush_folder(parent)
        return Folder(folder)

    def discard(self) -> None:
        """Whoever still writes to it, or would rename it, finds nothing under its name."""
        step = STEP.search(self.name)
        assert step is not None
        hidden = self.path.with_name(f".{step[0]}.{secrets.token_hex(8)}.partial")
        self.path.rename(hidden)
        flush_folder(hidden.parent)
        shutil.rmtree(hidden, ignore_errors=True)


@dataclass(frozen=True)
class OpenFile:
    """A file by its number; a ``storage.ByteSource``."""

    path: str
    number: int
    size: int

    def read(self, start: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self.number, [into], start)
            if not count:
                raise OSError(f"{self.path!r} ends at byte {start}, and was longer when it was opened")
            start, into = start + count, into[count:]


def removed(folder: Storage) -> str:
    """Says that a checkpoint that was there is gone and later ones are there; empty where that is not so."""
    home, name = folder.home()
    others = checkpoints(home) if STEP.fullmatch(name) else []
    if not others or name in (other.name for other in others) or step_of(others[-1]) < step_of(home / name):
        return ""
    return f"{str(folder)!r} was removed by retention (keep) while it was read: the newest is {str(others[-1])!r}"


def step_name(step: int) -> str:
    """A checkpoint's folder."""
    return f"step-{step:06d}"


def contents(path: Storage, largest: int) -> bytes:
    """All bytes of a small file; ValueError for more than ``largest``."""
    with path.opened() as file:
        if file.size > largest:
            raise ValueError(f"{str(path)!r} has {file.size} bytes, and may have {largest}")
        file.read(0, memoryview(data := bytearray(file.size)))
    return bytes(data)


def read_manifest(folder: Storage) -> Manifest:
    """A checkpoint's manifest; ValueError for anything else."""
    return parse_manifest(folder, contents(folder / NAME, LARGEST))


def parse_manifest(folder: Storage, data: bytes) -> Manifest:
    """A checkpoint's manifest, given its bytes."""
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


def check_file(path: Storage, stored: StoredFile, threads: int = 1) -> None:
    """Raises ValueError where a file is not, byte for byte, the one that was written; so many threads read it."""
    with path.opened() as file:
        if file.size != stored.bytes:
            raise ValueError(f"{str(path)!r} has {file.size} bytes, and {stored.bytes} were written")
        digest = digest_of(stored.hash, file.size, path.chunk, threads, file.read)
    if digest != stored.digest:
        raise ValueError(f"{str(path)!r} is not what was written: its digest ({stored.hash}) is another")


def find(path: str | Path | Storage) -> Storage:
    """The checkpoint that a path means: itself, or the newest of a folder of checkpoints, which may be a run's.

    Raises:
        ValueError: there is none.
    """
    path = place(path)
    if NAME in path.names():
        return path
    if others := all_of(path):
        return others[-1]
    if STEP.fullmatch(path.name):
        raise ValueError(f"{str(path / NAME)!r} is not there: {str(path)!r} is no whole checkpoint")
    raise ValueError(f"there is no checkpoint in {str(path)!r}: it has no folder {step_name(1)} or the like")


def all_of(path: str | Path | Storage) -> list[Storage]:
    """The checkpoints in a place, and in what a run in it has written, the newest last: somebody may have brought one
    beside those of a run."""
    path = place(path)
    return sorted((*checkpoints(path), *checkpoints(path / CHECKPOINTS)), key=step_of)


def checkpoints(path: str | Path | Storage) -> list[Storage]:
    """The checkpoints in a place, the newest last; a damaged one is among them."""
    path = place(path)
    return sorted((path / name for name in path.checkpoints()), key=step_of)


def step_of(checkpoint: Storage) -> int:
    """The steps that it has made, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def begin(parent: Storage, step: int, own: str, *, first: bool = True) -> Storage:
    """Where a new checkpoint's files go, and what an earlier run has left unfinished is gone.

    Raises:
        ValueError: the checkpoint is there already.
        OSError: the place cannot be written, or is not there though this is not the ``first`` save in it.
    """
    partial = parent.partial(step_name(step), own)
    partial.begin(first=first)
    return partial


def publish(partial: Storage, manifest: Manifest) -> Storage:
    """Everybody has written: add the manifest, and let the checkpoint be there, in the place that is returned."""
    text = manifest.text()
    Manifest.parse(text)  # what could not be read again is not written
    return partial.publish(text, sorted(manifest.files))


def flush_folder(path: Path) -> None:
    """Wait until the disk has a folder's entries."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
