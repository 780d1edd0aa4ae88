"""Where checkpoints are kept: the little that saving and loading ask of a place.

                 a folder of a file system (``folder``)              objects under a URL (``objects``)
    begun        .step-000123.9f3c.partial/rank-00000.safetensors    step-000123/rank-00000.9f3c.safetensors
    published    the manifest, flushed, then renamed                 the manifest, put last
    there        when the folder has its name                        when the manifest is
    left over    hidden folders                                      files of a save whose manifest is not there

What is left over of a save that was ended, the next save in the same place removes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

LATEST = "latest"
"""The name of a line with the newest checkpoint's name, for scripts and people."""


class ByteSource(Protocol):
    """A file that is open to be read."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on; OSError where the file ends before."""


class Storage(ABC):
    """A file, or a folder of files: ``place / name``; ``str(place)`` leads back to it."""

    gap: ClassVar[int]
    """Bytes that cost less to read than to pass over."""
    chunk: ClassVar[int]
    """Bytes to read at a time."""
    pause: ClassVar[float]
    """Seconds, at most, between two looks for what other ranks write."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of its path."""

    @abstractmethod
    def home(self) -> tuple["Storage", str]:
        """The folder that it is in, past any links, and its name there."""

    @abstractmethod
    def __truediv__(self, name: str) -> "Storage": ...

    @abstractmethod
    def given(self) -> Path | str:
        """As a user writes it."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in a folder; nothing where there is none."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[ByteSource]:
        """To read; ValueError for what is no plain file: missing, a link, a pipe, a device, a folder."""

    @abstractmethod
    def created(self) -> AbstractContextManager[BinaryIO]:
        """A new file to write; when the block ends, it is kept."""

    @abstractmethod
    def put(self, data: bytes) -> None:
        """A small file, which is there as a whole or not at all, in the place of one that is."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that there is room for; None where nobody knows."""

    @abstractmethod
    def checkpoints(self) -> list[str]:
        """The names in it of checkpoints that were published, in any order."""

    @abstractmethod
    def partial(self, folder: str, own: str) -> "Storage":
        """Where the files of the save with the id ``own`` go until they are published as ``folder``."""

    @abstractmethod
    def file(self, rank: int, kind: str) -> "Storage":
        """Of a ``partial``: a file of a rank; ``kind`` is the end of its name."""

    @abstractmethod
    def begin(self, *, first: bool = True) -> None:
        """Of a ``partial``: make it; what other saves have left unfinished is gone.

        With the ``first`` save of a run the folder around it is made; one that is gone later (a disk that is no longer
        mounted) is an OSError.

        Raises ValueError where the checkpoint is there already.
        """

    @abstractmethod
    def publish(self, manifest: str, files: Sequence[str]) -> "Storage":
        """Of a ``partial``: leave these files alone in it, add the manifest's text, and let the checkpoint be there.

        Raises OSError where it is not, or where only the line in ``latest`` could not be written.
        """

    @abstractmethod
    def discard(self) -> None:
        """Take a checkpoint, or a ``partial`` that was not published, away.

        From the first moment on it is not there any more; a rest of it goes at the next ``begin``.
        """


def exists_already(place: Storage) -> ValueError:
    """A checkpoint that is there already."""
    return ValueError(
        f"{str(place)!r} exists already, and a checkpoint is never overwritten: save to another folder, or move this "
        f"one away"
    )
