"""Memory that several processes map, and that disappears with the last of them.

A segment is an anonymous file (``memfd_create``): it has no name, so nothing is left after ``kill -9``, and
/dev/shm, which is 64 MB in many containers, does not limit it.  Others open it by its owner's process id and
descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")

_CACHE = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)
"""Matches the memory of a container that the kernel frees on demand: the pages of files."""

MOST_VIEWS = 4096
"""The most views kept of one segment."""


class Segment:
    """Mapped memory: its ``buffer`` and ``address``."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.buffer = mmap.mmap(descriptor, size)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    @classmethod
    def make(cls, size: int, name: str = "plait") -> Segment:
        """Makes a segment of ``size`` bytes, in whole pages, all zero; ``open`` checks ``name``.

        Raises:
            MemoryError: less memory is left; the message has the numbers.
        """
        if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
            raise ValueError("memory that ranks share needs Linux 5.3, and a Python made for it: take --world process")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        text = f"{size / 2**20:.1f} MiB of shared memory cannot be had"
        fix = "give smaller units or a smaller batch, or take --world process"
        if size > (have := available()):  # the kernel would end processes to find it
            raise MemoryError(f"{text}, {have / 2**20:.1f} MiB are available: {fix}")
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)  # otherwise a missing page is a SIGBUS later
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            limit = "; `ulimit -f` limits it too" if error.errno == errno.EFBIG else ""
            raise MemoryError(f"{text} ({os.strerror(error.errno)}{limit}): {fix}") from error
        return cls(descriptor, size)

    @classmethod
    def open(cls, process_id: int, descriptor: int, name: str) -> Segment:
        """Opens another process's segment; OSError if it is gone, another user's, or not of that name."""
        where = f"/proc/{process_id}/fd/{descriptor}"
        mine = -1
        if os.readlink(where) == f"/memfd:{name} (deleted)":
            mine = os.open(where, os.O_RDWR | os.O_CLOEXEC)
        try:
            if mine < 0 or os.readlink(f"/proc/self/fd/{mine}") != f"/memfd:{name} (deleted)":
                raise OSError(errno.ESTALE, "it is another file by now")
            return cls(mine, os.fstat(mine).st_size)
        finally:
            if mine >= 0:
                os.close(mine)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of ``numel`` elements from byte ``offset``, which is a multiple of their size."""
        found = self._views.get(key := (offset, numel, dtype))  # blocks are used again, and a view costs microseconds
        if found is None:
            with torch.inference_mode(False):  # otherwise it could only be written in that mode
                if dtype not in self._typed:
                    self._typed[dtype] = torch.frombuffer(self.buffer, dtype=dtype)
                if len(self._views) >= MOST_VIEWS:
                    self._views.clear()
                start = offset // dtype.itemsize
                found = self._views[key] = self._typed[dtype][start : start + numel]
        return found

    def close(self) -> None:
        """Closes the owner's descriptor: no process can open it any more, but one that has it keeps it."""
        os.close(self.descriptor)


def available() -> int:
    """Returns the bytes of memory that this host, and the limit of this container, could give now."""
    found = [2**63]
    with suppress(OSError, ValueError, IndexError):
        found.append(1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]))
    with suppress(OSError, ValueError):  # there is no such limit
        room = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        found.append(room + sum(map(int, _CACHE.findall((CGROUP / "memory.stat").read_text()))))
    return min(found)
