"""``plait.save`` and ``plait.Saver``: every rank writes the pieces that no rank before it has; nothing is gathered.

    save        all ranks    what is to be written, checked; weights copied, where the program goes on
                rank 0       a hidden folder                                    is all well? agreed
    meanwhile   each rank    moments copied ──► its file ──► a note of it       a thread, which sends nothing
                rank 0       all notes ──► manifest ──► renamed ──► latest      its thread
    wait        all ranks    have all written, and rank 0 renamed? agreed

What one rank cannot do (a full disk, a weight that is not finite) no rank has done: all raise, and the checkpoint
before stays the newest.
"""

import secrets
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.checkpoint.folder import Folder, begin, place, step_name
from plait.checkpoint.retention import remove_left_over
from plait.checkpoint.same_folder import check_same_folder
from plait.checkpoint.snapshot import HostMemory, LateCopy, numbers_of, taken
from plait.checkpoint.storage import Storage
from plait.checkpoint.writing import FAILED, RUNNING, Save, Writing, saying
from plait.comm.agree import broadcast_text, check_together, gather_ints
from plait.step import EMA, Engine
from plait.table.collectives import Note
from plait.table.mesh import AXES

DEADLINE = 600.0
ASKED = 0.25
"""Seconds after which waiting ranks ask each other again, well within the deadline of a collective."""


def save(path: str | Path, engine: Engine, *, ema: EMA | None = None, extra: Any = None) -> Path | str:
    """Save a run between two steps, so that any layout can go on with it; all ranks call it together.

    It has parameters, buffers, the optimizers' state and groups, the number of steps made, the loss scale, and an
    average of the weights.  The checkpoint is ``path/step-000123``; one that is there is never overwritten.

    Args:
        path: a folder for the checkpoints of one run, which all ranks see, or a URL, as ``s3://bucket/run``.
        extra: what else goes on, of rank 0: numbers, strings, tensors, and lists, tuples and dicts of them (a
            scheduler's ``state_dict()``, an epoch).

    Returns:
        The checkpoint's folder, or its URL.

    Raises:
        ValueError: in a step; the checkpoint exists, a weight is not finite, ``extra`` is of another type.
        OSError: a file or folder that this rank could not write, with the bytes that it needs and those that are free.
        RuntimeError: what another rank raises.
    """
    saver = Saver(path, engine, ema=ema, background=False)
    saver.save(extra)
    published = saver.wait()
    assert published is not None
    return published


class Saver:
    """Saves one run again and again, while it goes on; old checkpoints go.

    Args:
        path: a folder for the checkpoints of one run, which all ranks see, or a URL, as ``s3://bucket/run``.
        ema: an average of the weights, which is saved too.
        keep: so many checkpoints are left, the newest ones; None removes none.  Before any goes, the newest is read
            back and its hashes are checked.  What has a file ``pinned`` in its folder stays.
        background: ``save`` copies the weights into memory of the host and returns; a thread copies what optimizers
            keep, for which the next update waits, and writes.  With False it returns when the checkpoint is there, and
            copies nothing.
        deadline: seconds that a save may take until every rank has written.

    Raises:
        ValueError: ``keep`` is below 1, ``ema`` is another engine's.
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
        given = place(path)
        self.place = Folder(given.path.absolute()) if isinstance(given, Folder) else given
        self.engine, self.ema, self.keep = engine, ema, keep
        self.background, self.deadline = background, deadline
        self.waited = 0.0
        """Seconds that the last ``save`` waited for the one before it."""
        self._memory = HostMemory()
        self._writing: Writing | None = None
        self._published: Path | str | None = None
        self._own, self._begun = "", 0
        """Rank 0's word for this saver, and how many saves it has begun: the name of each, for all ranks."""

    def save(self, extra: Any = None) -> None:
        """Save the run as it is now; all ranks call it together, between two steps.

        The weights may change as soon as it returns.  One save is under way at a time: a second one waits for it first
        (``waited`` seconds).

        Args:
            extra: as for ``plait.save``.

        Raises:
            ValueError: as ``plait.save`` does.
            OSError: what became of the save before, as ``wait`` raises it; this one has not begun.
            RuntimeError: what another rank raises.
        """
        self.engine.check_between_steps("a save")
        start = time.monotonic()
        self.wait()
        self.waited = time.monotonic() - start
        self._writing = self._begin(extra)
        if not self.background:
            self.wait()

    def wait(self) -> Path | str | None:
        """Wait until the last save is there; all ranks call it together.

        Returns:
            The folder, or the URL, of the last checkpoint that was saved here; None before the first.

        Raises:
            OSError: a file or folder that this rank could not write, with the bytes that it needs and those that are
                free; TimeoutError names the ranks that have not written within the deadline.
            ValueError: what was saved is not what is read back.
            RuntimeError: what another rank raises.
        """
        writing, comm = self._writing, self.engine.comm
        if writing is None:
            return self._published
        states = [RUNNING]
        while RUNNING in states:
            writing.done.wait(min(ASKED, comm.deadline / 4))
            states = [state for (state,) in gather_ints(comm, [writing.has()], AXES, Note("check"))]
            if FAILED in states:
                writing.stop.set()
        self._writing = None
        self._check_together(writing.error, writing.save.partial)
        self._published = (self.place / step_name(writing.save.step)).given()
        return self._published

    def _begin(self, extra: Any) -> Writing:
        """Everything that needs the program's own thread; from here on the weights may change."""
        engine, comm = self.engine, self.engine.comm
        numbers = numbers_of(engine)
        error: Exception | None = None
        if not self._own:
            self._own = broadcast_text(comm, secrets.token_hex(8), Note("state"))
        self._begun += 1
        own = f"{self._own}{self._begun:08x}"
        try:
            (pieces, state), late = taken(engine, self.ema, numbers, extra), list[LateCopy]()
            if self.background or comm.device.type != "cpu":  # what is hashed and written leaves a device once
                pieces, late = self._memory.copies(pieces)
            if not comm.rank:
                with saying(self.place, sum(piece.tensor.nbytes for piece in pieces)):
                    if self.keep is not None and self._published is None:
                        remove_left_over(self.place, engine.steps, self.keep)
                    begin(self.place, engine.steps, own, first=self._published is None)
        except Exception as problem:
            error = problem
        name = step_name(engine.steps)
        self._check_together(error, self.place.partial(name, own))
        if self._published is None and isinstance(folder := self.place.given(), Path):
            check_same_folder(folder, comm)
        partial = self.place.partial(name, own)
        about = Save(partial, own, engine.steps, self.keep, self.deadline, comm.deadline)
        writing = Writing(about, comm.rank, comm.world_size, pieces, late, state)
        if engine.owned_optimizer is not None:
            engine.owned_optimizer.wait_for_reader()  # of another Saver
            engine.owned_optimizer.reader = writing.copied
        return writing

    def _check_together(self, error: Exception | None, partial: Storage) -> None:
        """Raise what any rank raises; nothing is left of what was begun."""
        try:
            check_together(self.engine.comm, error, AXES)
        except Exception:
            self._memory = HostMemory()  # a thread that is late may still read the other
            if not self.engine.comm.rank:
                with suppress(OSError):  # it may be gone, or be a checkpoint by now
                    partial.discard()
            raise

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last save; where an error ends the block, others may not come, and the threads finish alone."""
        if kind is None:
            self.wait()
