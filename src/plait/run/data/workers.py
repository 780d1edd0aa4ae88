"""Makes the microbatches of the next steps ahead, in worker processes.

    step            0   1   2   3   4   5 ...
    worker 0        0       2       4              a worker makes whole steps of this rank, two ahead
    worker 1            1       3       5
    the rank        0   1   2   3                  and the rank gets them in order

Batches are functions of the step (``data.batches``), so workers share nothing with each other or with the rank, and
bits and order do not depend on their number.

Workers are new processes of torch's DataLoader.  They close with the stream, and end by themselves, within seconds,
when the rank that started them is gone.
"""

import multiprocessing.connection
import multiprocessing.queues
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from plait.checkpoint.files.writing import told
from plait.messages.ended import EndedError
from plait.run.data.batches import Batch, Batches, on_device

SETTLE_SECONDS = 1.0
"""Wait between a worker's broken pipe and the kernel's report that it has ended."""


@dataclass(frozen=True)
class StepDataset(Dataset[list[Batch]]):
    """A data rank's microbatches by step: the map-style dataset that is copied to the workers."""

    batches: Batches
    data_rank: int
    num_data_ranks: int
    num_microbatches: int
    global_batch: int

    def __getitem__(self, step: int) -> list[Batch]:
        place = (self.data_rank, self.num_data_ranks, self.num_microbatches)
        return self.batches.microbatches(step, *place, self.global_batch)


class WorkerError(EndedError):
    """A data worker has ended before its time."""


class StepStream(Iterator[list[Batch]], AbstractContextManager["StepStream"]):
    """One rank's microbatches, on ``device``, in the order of ``steps``; a context manager that closes its workers.

    ``workers`` is the number of processes that make them ahead; 0 makes each on request.
    """

    def __init__(self, dataset: StepDataset, steps: range, workers: int = 0, device: str = "cpu") -> None:
        self._dataset, self._steps, self._workers, self._device = dataset, steps, workers, device
        self._next = 0
        self._iterator: Iterator[list[Batch]] | None = None

    def __next__(self) -> list[Batch]:
        if self._next >= len(self._steps):
            self.close()
            raise StopIteration
        try:
            if self._iterator is None:
                self._iterator = self._start()
            batches = next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:
            if ended := self._ended(SETTLE_SECONDS if isinstance(error, OSError | EOFError) else 0):
                raise WorkerError(ended) from error
            raise
        self._next += 1
        return on_device(batches, self._device)

    def _start(self) -> Iterator[list[Batch]]:
        steps = self._steps[self._next :]
        if not self._workers:
            return map(self._dataset.__getitem__, steps)
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=steps,
            num_workers=self._workers,
            collate_fn=list,  # the microbatches as they are
            multiprocessing_context="spawn",  # a fork of a rank would have its threads' locks and its devices
            worker_init_fn=_end_with_a_lost_batch,
            generator=torch.Generator(),  # it seeds the workers and leaves torch's generator alone
        )
        with told("/dev/shm", 0):  # locks have their names there
            started: Iterator[list[Batch]] = iter(loader)
        return started

    def _ended(self, seconds: float) -> str:
        """Describes how a worker has ended, now or within some seconds.  Returns "" while all are alive."""
        workers: Sequence[Any] = getattr(self._iterator, "_workers", ())
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], seconds)
        for number, worker in enumerate(workers):
            if worker.sentinel in ended:
                worker.join(seconds)  # its exit code comes a moment later
            if code := worker.exitcode:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                why = ": memory, or room in /dev/shm, may have run out; --workers 0 makes batches without it"
                return f"data worker {number} (pid {worker.pid}) of this rank {how}{why}"
        return ""

    def close(self) -> None:
        """Ends the workers."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self._workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        self.close()


def _end_with_a_lost_batch(worker: int) -> None:
    """Makes this worker end where a batch cannot be sent.  Python would go on, and the rank wait forever."""

    def lose(error: Exception, batch: object) -> None:
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(lose)  # type: ignore[attr-defined]
