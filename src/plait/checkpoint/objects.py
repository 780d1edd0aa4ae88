"""Objects under a URL, where nothing can be renamed: a checkpoint exists once its manifest does.

    s3://bucket/run/step-000123/rank-00000.9f3c.safetensors    named after its save: no two saves share a file
    s3://bucket/run/step-000123/manifest.json                  put last, atomically
    s3://bucket/run/latest                                     a line with its name, for scripts and people

The stores are those of fsspec, each from a package of its own (s3fs, gcsfs, adlfs).  Listings are never cached, since
other ranks write there too.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO

from plait.checkpoint.folder import LATEST, STEP, exists_already
from plait.checkpoint.manifest import NAME

PART = ".part"
"""Suffix of an object that is not yet complete."""
WRITTEN = re.compile(rf"rank-[0-9]+\.([0-9a-f]+\.)?(safetensors|json)({PART})?|{NAME}{PART}")
"""The files that a save writes, besides its manifest."""


def place_of(url: str) -> "Objects":
    """See ``places.place``."""
    if "::" in url:
        raise ValueError(f"{url!r} is a chain of URLs: give the URL of the files themselves")
    try:
        store, path = import_module("fsspec.core").url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{url!r}: {error}; install plait[fsspec] and the package for these URLs, or give a folder"
        ) from error
    return Objects(store, path.rstrip("/"), url.rstrip("/"))


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Stores raise errors of many types."""
    try:
        yield
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


@dataclass(frozen=True)
class Objects:
    """An object, or all objects below a path; the same methods as ``Folder``."""

    store: Any
    path: str
    url: str
    own: str = ""
    """The id of the save; only in a ``partial``."""

    gap = 1 << 20
    chunk = 1 << 24
    pause = 1.0

    def __str__(self) -> str:
        return self.url

    def given(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def home(self) -> tuple["Objects", str]:
        return Objects(self.store, self.path.rpartition("/")[0], self.url.rpartition("/")[0]), self.name

    def __truediv__(self, name: str) -> "Objects":
        return Objects(self.store, f"{self.path}/{name}", f"{self.url}/{name}")

    def names(self) -> list[str]:
        with _as_os_error(self.url):
            self.store.invalidate_cache()
            try:
                return [path.rstrip("/").rpartition("/")[2] for path in self.store.ls(self.path, detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    @contextmanager
    def opened(self) -> Iterator["OpenObject"]:
        with _as_os_error(self.url):
            self.store.invalidate_cache()
            try:
                about = self.store.info(self.path)
            except FileNotFoundError:
                about = {}
        if about.get("type") != "file":
            raise ValueError(f"{self.url!r} is no file that can be read: {about.get('type', 'it is not there')}")
        yield OpenObject(self, about["size"])

    @contextmanager
    def created(self) -> Iterator[BinaryIO]:
        with _as_os_error(self.url):
            file = self.store.open(self.path, "wb")
        try:
            yield file
        finally:
            with _as_os_error(self.url):
                file.close()

    def put(self, data: bytes) -> None:
        with _as_os_error(self.url):  # not every store puts atomically: fsspec's local one does not
            self.store.pipe_file(f"{self.path}{PART}", data)
            self.store.mv(f"{self.path}{PART}", self.path)

    def free(self) -> None:
        return None

    def checkpoints(self) -> list[str]:
        return [name for name in self.names() if STEP.fullmatch(name) and NAME in (self / name).names()]

    def partial(self, folder: str, own: str) -> "Objects":
        return Objects(self.store, f"{self.path}/{folder}", f"{self.url}/{folder}", own)

    def file(self, rank: int, kind: str) -> "Objects":
        return self / f"rank-{rank:05d}.{self.own}.{kind}"

    def begin(self, *, first: bool = True) -> None:
        if NAME in self.names():
            raise exists_already(self)
        parent, _ = self.home()
        for name in parent.names():
            if STEP.fullmatch(name) and NAME not in (inside := (folder := parent / name).names()):
                folder._remove([file for file in inside if WRITTEN.fullmatch(file)])
        with _as_os_error(self.url):
            self.store.makedirs(self.path, exist_ok=True)

    def _remove(self, names: Sequence[str]) -> None:
        with _as_os_error(self.url):
            for name in names:
                self.store.rm_file((self / name).path)

    def publish(self, manifest: str, files: Sequence[str]) -> "Objects":
        """Another save in the same place, which took this run for dead, may have removed the files."""
        there = self.names()
        if lost := [name for name in files if name not in there]:
            raise OSError(errno.ENOENT, "it is gone: another run saves in the same place", str(self / lost[0]))
        if NAME in there:
            raise exists_already(self)
        self._remove([name for name in there if WRITTEN.fullmatch(name) and name not in files])
        (self / NAME).put(manifest.encode())
        parent, name = self.home()
        (parent / LATEST).put(f"{name}\n".encode())
        return parent / name

    def discard(self) -> None:
        names = self.names()
        if not self.own:
            self._remove([name for name in (NAME,) if name in names])
            self._remove([name for name in names if name != NAME])
        elif NAME not in names:
            self._remove([name for name in names if f".{self.own}." in name])


@dataclass(frozen=True)
class OpenObject:
    """An object of a known size."""

    place: Objects
    size: int

    def read(self, start: int, into: memoryview) -> None:
        step = self.place.chunk
        for at in range(0, len(into), step):
            part = into[at : at + step]
            with _as_os_error(self.place.url):
                data = self.place.store.cat_file(self.place.path, start=start + at, end=start + at + len(part))
            if len(data) != len(part):
                raise OSError(f"{self.place.url!r} ends before byte {start + at + len(part)}")
            part[:] = data
