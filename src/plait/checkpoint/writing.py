"""A rank's part of a save, written by a thread: its file, then a note about it.  Rank 0 publishes all of them.

    .step-000123.9f3c.partial/rank-00002.safetensors    hashed while it is written, then flushed
    .step-000123.9f3c.partial/rank-00002.json           its entries in the manifest
    .step-000123.9f3c.partial/manifest.json             replaces the notes once all are there; then the rename

The threads send no messages, because these would meet the messages of the training.  The ranks exchange the outcome
when their own programs wait for it (``save``).

Rank 0 removes old checkpoints, once the newest one has been read back and has the right hashes:

    step-000100   step-000200   step-000300   step-000400      keep=2, step 400 has just been saved
    removed       removed       kept          verified         (step-000500 of another run, or `best`: left alone)
"""

import errno
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.files.reading import read_file
from plait.checkpoint.files.writing import told
from plait.checkpoint.folder import checkpoints, discard, names, publish, put, rank_file
from plait.checkpoint.manifest import LARGEST, NAME, entries_of, manifest_text
from plait.checkpoint.snapshot import OPTIMIZER, RankPiece
from plait.checkpoint.stored import Checkpoint
from plait.checkpoint.tensor_file import write_tensor_file
from plait.comm.deadline import clock
from plait.comm.texts import named

FILE, NOTE = "safetensors", "json"
RUNNING, DONE, FAILED = range(3)
PAUSE = 0.02
"""The longest pause between two looks for other ranks' files, in seconds."""


@dataclass(frozen=True)
class Save:
    """One save, the same on all ranks."""

    partial: Path
    id: str
    step: int
    ranks: int
    keep: int | None
    deadline: float
    """The seconds for the whole save."""


class Writing:
    """This rank's part of a save, in progress.

    Args:
        state: the manifest's values, on rank 0.
    """

    def __init__(self, save: Save, rank: int, pieces: Sequence[RankPiece], state: Any) -> None:
        self.save, self.rank, self.pieces, self.state = save, rank, pieces, state
        self.error: Exception | None = None
        self.done, self.stop = threading.Event(), threading.Event()
        self._begun = clock()
        self._end = self._begun + save.deadline
        self._program = threading.current_thread()
        threading.Thread(target=self._write, name="plait.save").start()

    def outcome(self) -> int:
        """RUNNING, DONE (without an error) or FAILED."""
        if not self.done.is_set() and self.error is None and clock() > self._end:
            self.error = TimeoutError(
                f"rank {self.rank} has not written {str(rank_file(self.save.partial, self.rank, FILE))!r} within "
                f"{self.save.deadline:g} s: look at its disk, or give Saver(deadline=...) more"
            )
        if self.error is not None:
            return FAILED
        return DONE if self.done.is_set() else RUNNING

    def _write(self) -> None:
        time.sleep(0)  # lets the program continue at once
        try:
            note = json.dumps(write_part(self.save.partial, self.rank, self.pieces)).encode()
            with told(self.save.partial, len(note)):
                put(rank_file(self.save.partial, self.rank, NOTE), note)
            if not self.rank and (notes := self._notes()) is not None:
                self._publish(notes)
        except Exception as problem:
            if self.error is None:
                self.error = problem
                if not self._program.is_alive():
                    raise  # prints it: the program can no longer ask for it
        finally:
            self.done.set()

    def _publish(self, notes: Sequence[Any]) -> None:
        """Adds the manifest from all notes, and removes old checkpoints."""
        save = self.save
        text = manifest_text(save.id, save.step, notes, self.state)
        with told(save.partial / NAME, len(text)):
            published = publish(save.partial, text, [name for note in notes for name in note["files"]])
        if save.keep is not None:
            remove_older(published, save.keep)

    def _notes(self) -> list[Any] | None:
        """Returns the notes of all ranks; None once they are no longer needed."""
        partial, missing, pause = self.save.partial, list(range(self.save.ranks)), 0.01
        while True:
            there = set(names(partial))
            if not (missing := [rank for rank in missing if rank_file(partial, rank, NOTE).name not in there]):
                break
            if self.stop.wait(pause := min(2 * pause, PAUSE)):
                return None
            if rank_file(partial, 0, NOTE).name not in there:
                with told(partial, sum(one.tensor.nbytes for one in self.pieces)):
                    raise FileNotFoundError(errno.ENOENT, "the folder of a save has vanished")
            if clock() > self._end:
                raise TimeoutError(
                    f"rank 0 has waited {clock() - self._begun:.1f} s for {named(missing)} to write to "
                    f"{str(partial)!r}: nothing is saved; look at their disks, see that all hosts share this "
                    f"folder, or give Saver(deadline=...) more"
                )
        notes = [rank_file(partial, rank, NOTE) for rank in range(self.save.ranks)]
        return [json.loads(read_file(note, "the note", LARGEST, links=False)) for note in notes]


def write_part(partial: Path, rank: int, pieces: Sequence[RankPiece]) -> dict[str, Any]:
    """Writes a rank's file; returns its entries in the manifest.

    Raises:
        OSError: with the path, the bytes to write, and those that are free.
        ValueError: optimizer state is not finite; weights were checked before they were copied.
    """
    for one in pieces:
        if one.kind == OPTIMIZER:
            one.check_finite()
    file = rank_file(partial, rank, FILE)
    with told(file, sum(one.tensor.nbytes for one in pieces)):
        tensors = [(tuple(one.tensor.shape), one.tensor.dtype, [one.tensor]) for one in pieces]
        size, digest = write_tensor_file(file, tensors)
    rows = [(one.name, one.tensor.dtype, one.shape, one.region) for one in pieces]
    return entries_of(file.name, size, digest, rows)


def remove_older(newest: Path, keep: int) -> None:
    """Removes checkpoints of fewer steps until ``keep`` are left, the newest included.  Raises ValueError, and removes
    nothing, if the newest one is damaged."""
    newest = newest.resolve()
    folders = checkpoints(newest.parent)
    older = [folder for folder in folders[: folders.index(newest)] if _may_go(folder)]
    going = older[: max(0, len(older) - (keep - 1))]
    if not going:
        return
    try:
        read = Checkpoint.find(newest)
        for file in read.manifest.files:
            read.check_file(file)
    except ValueError as error:
        raise ValueError(f"{str(newest)!r} has been saved, but {error}; no older checkpoint was removed") from error
    for folder in going:
        discard(folder)


def _may_go(folder: Path) -> bool:
    return not folder.is_symlink() and NAME in names(folder)
