"""Disks so small that they fill up, and what mounts them; where nothing can be mounted the test is left out."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*arguments: str) -> int:
    """The exit code of ``mount``."""
    return subprocess.run(["mount", *arguments], capture_output=True).returncode if shutil.which("mount") else 1


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A new folder that is a disk of this size, as in ``512k``."""
    place.mkdir()
    if mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)):
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
