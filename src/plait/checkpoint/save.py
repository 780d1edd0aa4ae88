"""``plait.save`` and ``plait.Saver``: each rank writes the pieces that no lower rank has, so nothing is gathered.

    save        all ranks    contents checked, and copied if the program goes on
                rank 0       a hidden folder                                    an error? agreed
    meanwhile   each rank    its file ──► a note about it                      a thread, which sends nothing
                rank 0       all notes ──► manifest ──► renamed ──► latest      its thread
    wait        all ranks    all written, and rank 0 renamed? agreed

If one rank fails (a full disk, a weight that is not finite) all raise, and the last checkpoint stays the newest.
"""

import secrets
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.checkpoint.files.writing import Lines, told
from plait.checkpoint.folder import begin, discard, folder_at, partial_of, step_name
from plait.checkpoint.same_folder import check_same_folder
from plait.checkpoint.snapshot import HostMemory, taken, values_of
from plait.checkpoint.writing import FAILED, RUNNING, Save, Writing
from plait.comm.agree import gather_ints
from plait.comm.texts import broadcast_text, check_together
from plait.step import EMA, Engine
from plait.table.collectives import Note
from plait.table.mesh import AXES

DEADLINE = 600.0
ASKED = 0.25
"""The seconds after which waiting ranks ask each other again, well within a collective's deadline."""


def save(path: str | Path, engine: Engine, *, ema: EMA | None = None, extra: Any = None) -> Path:
    """Saves a run between two steps; any layout can continue it.  All ranks call it together.

    The checkpoint is ``path/step-000123``.  It has parameters, buffers, the optimizers' state and groups, the number of
    steps, the seed, the loss scale, and an average of the weights.  An existing one is never overwritten.

    Args:
        path: a folder for one run's checkpoints that all ranks see.
        extra: any other state, from rank 0: numbers, strings, tensors, and lists, tuples and dicts of them (a
            scheduler's ``state_dict()``, an epoch).

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: called within a step; the checkpoint exists, a weight is not finite, ``extra`` has another type.
        OSError: this rank could not write; it has the path, the bytes needed and the bytes free.
        RuntimeError: another rank's error.
    """
    saver = Saver(path, engine, ema=ema, background=False)
    saver.save(extra)
    published = saver.wait()
    assert published is not None
    return published


class Saver:
    """Saves a run repeatedly while it goes on, and removes old checkpoints.

    Args:
        path: as for ``plait.save``.
        ema: an average of the weights to save too.
        keep: the number of checkpoints to keep; None removes none.  The newest is read back and verified before any
            other is removed.  A checkpoint whose folder has another name stays.
        background: ``save`` copies weights and optimizer state to host memory and returns; a thread writes.  With False
            ``save`` returns when the checkpoint exists, and copies nothing.
        deadline: the seconds within which every rank must have written.

    Raises:
        ValueError: ``keep`` is below 1, or ``ema`` belongs to another engine.
    """

    def __init__(
        self,
        path: str | Path,
        engine: Engine,
        *,
        ema: EMA | None = None,
        keep: int | None = None,
        background: bool = True,
        deadline: float = DEADLINE,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint stays; None removes none")
        if ema is not None:
            ema.check_of(engine)
        self.place = folder_at(path).absolute()
        self.engine, self.ema, self.keep = engine, ema, keep
        self.background, self.deadline = background, deadline
        self.waited = 0.0
        """The seconds that the last ``save`` waited for the one before it."""
        self._memory = HostMemory()
        self._writing: Writing | None = None
        self._lock: Lines | None = None
        """Rank 0's lock while a save is under way."""
        self._published: Path | None = None
        self._own, self._begun = "", 0
        """Rank 0's word for this saver, and the number of saves so far; together they name each save on all ranks."""

    def save(self, extra: Any = None) -> None:
        """Saves the run in its present state; all ranks call it together, between two steps.

        The run may go on once it returns.  It first waits for the save before it (``waited`` seconds), and raises that
        save's error without beginning another.  Arguments and errors are those of ``plait.save``.
        """
        self.engine.check_between_steps("a save")
        start = time.monotonic()
        self.wait()
        self.waited = time.monotonic() - start
        self._writing = self._begin(extra)
        if not self.background:
            self.wait()

    def wait(self) -> Path | None:
        """Waits for the last save; all ranks call it together.

        Returns:
            The last checkpoint's folder; None before the first.

        Raises:
            OSError: as for ``plait.save``; TimeoutError names the ranks that missed the deadline.
            ValueError: optimizer state is not finite, or a checkpoint is damaged when it is read back.
            RuntimeError: another rank's error.
        """
        writing, comm = self._writing, self.engine.comm
        if writing is None:
            return self._published
        states = [RUNNING]
        while RUNNING in states:
            writing.done.wait(min(ASKED, comm.deadline / 4))
            states = [state for (state,) in gather_ints(comm, [writing.outcome()], AXES, Note("check"))]
            if FAILED in states:
                writing.stop.set()
        self._writing = None
        self._unlock()
        self._check_together(writing.error, writing.save.partial)
        self._published = self.place / step_name(writing.save.step)
        return self._published

    def _begin(self, extra: Any) -> Writing:
        """Does the part that needs the program's thread; afterwards the run may go on."""
        engine, comm = self.engine, self.engine.comm
        values = values_of(engine, self.ema, extra)
        if not self._own:
            self._own = broadcast_text(comm, secrets.token_hex(8), Note("state"))
        self._begun += 1
        own, first = f"{self._own}{self._begun:08x}", self._published is None
        partial = partial_of(self.place, engine.steps, own)
        error: Exception | None = None
        try:
            pieces, state = taken(engine, self.ema, values)
            if self.background or comm.device.type != "cpu":  # one transfer for both hashing and writing
                pieces = self._memory.copies(pieces)
            if not comm.rank:
                with told(self.place, sum(piece.tensor.nbytes for piece in pieces)):
                    self._lock = begin(partial, first=first)
        except Exception as problem:
            error = problem
        self._check_together(error, partial)
        if first:
            check_same_folder(self.place, comm)
        about = Save(partial, own, engine.steps, comm.world_size, self.keep, self.deadline)
        return Writing(about, comm.rank, pieces, state)

    def _check_together(self, error: Exception | None, partial: Path) -> None:
        """Raises any rank's error on all ranks, and removes the unfinished save."""
        try:
            check_together(self.engine.comm, error, AXES)
        except Exception:
            self._memory = HostMemory()  # a late thread may still read the old one
            self._unlock()
            if not self.engine.comm.rank:
                with suppress(OSError):  # it may be gone, or be a checkpoint by now
                    discard(partial)
            raise

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the last save, unless an error ends the block: other ranks may not come then."""
        if kind is None:
            self.wait()
