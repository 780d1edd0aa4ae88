"""The place that a path or URL names, and the checkpoints in it.

The newest checkpoint is the one with the most steps; the line in ``latest`` may be one behind.
"""

from pathlib import Path
from typing import TypeAlias

from plait.checkpoint.folder import STEP, Folder, OpenFile
from plait.checkpoint.manifest import LARGEST, NAME, Manifest
from plait.checkpoint.objects import Objects, OpenObject, place_of

Storage: TypeAlias = Folder | Objects
Opened: TypeAlias = OpenFile | OpenObject

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in the folder of a ``plait train`` run."""


def place(path: str | Path | Storage) -> Storage:
    """The place that a path names: an object store for a URL such as ``s3://bucket/run``, else a folder.

    Raises:
        ValueError: the path has a null byte, the URL is not understood, or its package is not installed.
    """
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no path: it has a null byte")
    if isinstance(path, Folder | Objects):
        return path
    return place_of(path) if isinstance(path, str) and "://" in path else Folder(Path(path))


def find(path: str | Path | Storage) -> Storage:
    """The checkpoint at a path, or the newest one in it, a run's folder included; ValueError if there is none."""
    path = place(path)
    if NAME in path.names():
        return path
    if others := all_of(path):
        return others[-1]
    if STEP.fullmatch(path.name):
        raise ValueError(f"{str(path / NAME)!r} is not there: {str(path)!r} is no whole checkpoint")
    raise ValueError(f"there is no checkpoint in {str(path)!r}: it has no folder {step_name(1)} or the like")


def all_of(path: str | Path | Storage) -> list[Storage]:
    """All checkpoints in a folder and in its ``checkpoints``, the newest last."""
    path = place(path)
    return sorted((*checkpoints(path), *checkpoints(path / CHECKPOINTS)), key=step_of)


def checkpoints(path: str | Path | Storage) -> list[Storage]:
    """The checkpoints in a folder, damaged ones included, the newest last."""
    path = place(path)
    return sorted((path / name for name in path.checkpoints()), key=step_of)


def step_of(checkpoint: Storage) -> int:
    """The number of steps in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def step_name(step: int) -> str:
    """A checkpoint's name."""
    return f"step-{step:06d}"


def contents(path: Storage, largest: int) -> bytes:
    """Reads a small file; ValueError for more than ``largest`` bytes."""
    with path.opened() as file:
        if file.size > largest:
            raise ValueError(f"{str(path)!r} has {file.size} bytes, and may have {largest}")
        file.read(0, memoryview(data := bytearray(file.size)))
    return bytes(data)


def read_manifest(folder: Storage) -> Manifest:
    """Reads a checkpoint's manifest; ValueError for anything else."""
    return parse_manifest(folder, contents(folder / NAME, LARGEST))


def parse_manifest(folder: Storage, data: bytes) -> Manifest:
    """The manifest with these bytes; ValueError if it is damaged, or the folder's name has another step."""
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
