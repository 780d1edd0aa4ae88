"""A rank's part of a save, written by a thread of its own: its file, then a note of it; rank 0 publishes them all.

    .step-000123.9f3c.partial/rank-00002.safetensors    hashed while it is written, flushed
    .step-000123.9f3c.partial/rank-00002.json           its size, hash, names and regions
    .step-000123.9f3c.partial/manifest.json             when all notes are there, in their place; then the rename

The threads send nothing, since their messages would meet those of the training: what has become of the save, the ranks
tell each other when their own threads of control wait for it (``save.py``).
"""

import errno
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.files.writing import DiskError
from plait.checkpoint.folder import contents, publish
from plait.checkpoint.hashing import Hasher
from plait.checkpoint.manifest import DTYPES, LARGEST, NAME, Manifest, StoredFile, StoredPiece, StoredTensor
from plait.checkpoint.retention import remove_older
from plait.checkpoint.snapshot import LateCopy, Written
from plait.checkpoint.storage import Storage
from plait.checkpoint.tensor_file import safetensors_header
from plait.comm.agree import named
from plait.comm.deadline import clock

FILE, NOTE = "safetensors", "json"
RUNNING, DONE, FAILED = range(3)


@dataclass(frozen=True)
class Save:
    """One save, as all ranks know it."""

    partial: Storage
    """Where it is written."""
    id: str
    step: int
    keep: int | None
    deadline: float
    """Seconds for all of it."""
    patience: float
    """Seconds that rank 0 waits for the others where its own program has ended."""


class Writing:
    """This rank's part of a save, under way.

    Args:
        late: copies that are made first.
        state: the manifest's values; of rank 0.
    """

    def __init__(
        self, save: Save, rank: int, ranks: int, pieces: Sequence[Written], late: Sequence[LateCopy], state: Any
    ) -> None:
        self.save, self.rank, self.ranks, self.pieces, self.state = save, rank, ranks, pieces, state
        self._late = late
        self.error: Exception | None = None
        self.copied, self.done, self.stop = threading.Event(), threading.Event(), threading.Event()
        self._begun = clock()
        self._end = self._begun + save.deadline
        self._program = threading.current_thread()
        threading.Thread(target=self._write, name="plait.save").start()

    def has(self) -> int:
        """What has become of it: RUNNING, DONE (nothing is wrong with it) or FAILED."""
        if not self.done.is_set() and self.error is None and clock() > self._end:
            self.error = TimeoutError(
                f"rank {self.rank} has not written {str(self.save.partial.file(self.rank, FILE))!r} within "
                f"{self.save.deadline:g} s: look at its disk, or give Saver(deadline=...) more"
            )
        if self.error is not None:
            return FAILED
        return DONE if self.done.is_set() else RUNNING

    def _write(self) -> None:
        time.sleep(0)  # whoever started this thread goes on at once
        try:
            try:
                for copy in self._late:
                    copy.make()
            finally:
                self.copied.set()
            write_part(self.save.partial, self.rank, self.pieces)
            if not self.rank and (notes := self._notes()) is not None:
                published = publish_notes(self.save, notes, self.state)
                if self.save.keep is not None:
                    remove_older(published, self.save.keep)
        except Exception as problem:
            if self.error is None:
                self.error = problem
                if not self._program.is_alive():
                    raise  # nobody will ask: it is printed
        finally:
            self.done.set()

    def _notes(self) -> list[Any] | None:
        """What every rank has written; None where that is no longer asked."""
        partial, missing, pause = self.save.partial, list(range(self.ranks)), 0.01
        while True:
            there = set(partial.names())
            if not (missing := [rank for rank in missing if partial.file(rank, NOTE).name not in there]):
                break
            if self.stop.wait(pause := min(2 * pause, partial.pause)):
                return None
            if partial.file(0, NOTE).name not in there:
                with saying(partial, sum(one.tensor.nbytes for one in self.pieces)):
                    raise FileNotFoundError(errno.ENOENT, "the folder of a save has vanished")
            if not self._program.is_alive():
                self._end = min(self._end, clock() + self.save.patience)
            if clock() > self._end:
                raise TimeoutError(
                    f"rank 0 has waited {clock() - self._begun:.1f} s for what {named(missing)} should have "
                    f"written to {str(partial)!r}: nothing is saved; look at their disks, or give Saver(deadline=...) "
                    f"more"
                )
        return [json.loads(contents(partial.file(rank, NOTE), LARGEST)) for rank in range(self.ranks)]


def write_part(partial: Storage, rank: int, pieces: Sequence[Written]) -> None:
    """Write a rank's file, and the note of it.

    Raises:
        OSError: with the path, the bytes to write, and the bytes that the disk has left.
        ValueError: what an optimizer keeps is not finite; weights were looked at before their copies were made.
    """
    for one in pieces:
        if one.kept:
            one.check_finite()
    file = partial.file(rank, FILE)
    tensors = [one.tensor for one in pieces]
    with saying(file, sum(tensor.nbytes for tensor in tensors)):
        stored = write_tensors(file, tensors)
        rows = [[one.name, one.shape, str(one.tensor.dtype).removeprefix("torch."), one.region] for one in pieces]
        partial.file(rank, NOTE).put(json.dumps({**asdict(stored), "pieces": rows}).encode())


@contextmanager
def saying(file: Storage, need: int) -> Iterator[None]:
    """An OSError becomes a DiskError: where it was, how much was to be written and how much room there is."""
    try:
        yield
    except OSError as error:
        have = file.free()
        reason = f"{error.strerror or error}; need {need} bytes" + ("" if have is None else f", have {have} bytes")
        raise DiskError(error.errno or errno.EIO, reason, str(file)) from error


def write_tensors(path: Storage, tensors: Sequence[Tensor]) -> StoredFile:
    """A safetensors file of tensors that are called by their number; on the disk when it returns.

    A thread hashes them meanwhile: neither hashing nor the disk waits for the other.
    """
    shapes = {str(i): (tuple(tensor.shape), tensor.dtype) for i, tensor in enumerate(tensors)}
    header, starts, end = safetensors_header(shapes, {str(i): tensor.nbytes for i, tensor in enumerate(tensors)})
    ordered = sorted(starts, key=lambda key: (starts[key], tensors[int(key)].nbytes))
    digest, failed = Hasher(), list[Exception]()
    digest.update(header)

    def blocks() -> Iterator[memoryview]:
        for key in ordered:
            yield tensors[int(key)].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    def hash_all() -> None:
        try:
            for block in blocks():
                digest.update(block)
        except Exception as problem:  # no memory for a contiguous copy, say
            failed.append(problem)

    hashing = threading.Thread(target=hash_all, name="plait.hash")
    hashing.start()
    try:
        with path.created() as file:
            file.write(header)
            for block in blocks():
                file.write(block)
    finally:
        hashing.join()
    if failed:
        raise failed[0]
    return StoredFile(end, digest.hexdigest())


def publish_notes(save: Save, notes: Sequence[Any], state: Any) -> Storage:
    """Everybody has written: the checkpoint is there, in the place that is returned."""
    manifest = manifest_of(save, notes, state)
    with saying(save.partial / NAME, len(manifest.text())):
        return publish(save.partial, manifest)


def manifest_of(save: Save, notes: Sequence[Any], state: Any) -> Manifest:
    """Of all that the ranks have written."""
    files: dict[str, StoredFile] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for rank, note in enumerate(notes):
        file = save.partial.file(rank, FILE).name
        files[file] = StoredFile(note["bytes"], note["digest"])
        for number, (name, shape, dtype, region) in enumerate(note["pieces"]):
            kind = DTYPES[dtype], tuple(shape)
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"the ranks have different dtypes or shapes of {name!r}: {kinds[name]} and {kind}")
            place = tuple((start, stop) for start, stop in region)
            pieces.setdefault(name, []).append(StoredPiece(file, str(number), place))
    tensors = {name: StoredTensor(*kind, tuple(pieces[name])) for name, kind in kinds.items()}
    return Manifest(save.id, save.step, files, tensors, state)
