"""The microbatches of the coming steps, made ahead in worker processes.

    step            0   1   2   3   4   5 ...
    worker 0        0       2       4              a worker makes whole steps of this rank, two ahead
    worker 1            1       3       5
    the rank        0   1   2   3                  and gets them in order

Batches are functions of the step (``data.batches``), so workers share nothing with each other or with the rank, and
bits and order do not depend on their number.

A rank has threads, locks and devices that a copy of it could not use, so workers are copies of another process, which
has imported this module and done nothing else ("forkserver").  They are closed with the stream, and end on their own,
within seconds, when the rank that started them is gone.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from plait.data.batches import Batch, Batches, on_device

_BUILDING = threading.Lock()  # warnings are filtered for the whole process, and ranks may be threads of it


@dataclass(frozen=True)
class StepDataset(Dataset[list[Batch]]):
    """A data rank's microbatches by step: the map-style dataset of which workers get a copy."""

    batches: Batches
    data_rank: int
    num_data_ranks: int
    num_microbatches: int
    global_batch: int

    def __getitem__(self, step: int) -> list[Batch]:
        place = (self.data_rank, self.num_data_ranks, self.num_microbatches)
        return self.batches.microbatches(step, *place, self.global_batch)


class StepStream(Iterator[list[Batch]], AbstractContextManager["StepStream"]):
    """One rank's microbatches, on ``device``, in the order of ``steps``; a context manager that closes its workers.

    ``workers`` is the number of processes that make them ahead; 0 makes each when it is asked for.
    """

    def __init__(self, dataset: StepDataset, steps: range, workers: int = 0, device: str = "cpu") -> None:
        self._dataset, self._steps, self._workers, self._device = dataset, steps, workers, device
        self._next = 0
        self._iterator: Iterator[list[Batch]] | None = None

    def __next__(self) -> list[Batch]:
        if self._next >= len(self._steps):
            self.close()
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._start()
        batches = next(self._iterator)
        self._next += 1
        return on_device(batches, self._device)

    def _start(self) -> Iterator[list[Batch]]:
        steps = self._steps[self._next :]
        if not self._workers:
            return map(self._dataset.__getitem__, steps)
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torchdata.stateful_dataloader"])  # heard by the first only
        with _BUILDING, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            loader = StatefulDataLoader(
                self._dataset,
                batch_size=None,
                sampler=steps,
                num_workers=self._workers,
                collate_fn=list,  # the microbatches as they are
                multiprocessing_context=context,
                worker_init_fn=_watch_the_rank,
                generator=torch.Generator(),  # it numbers the workers; torch's own generator stays as it is
            )
        started: Iterator[list[Batch]] = iter(loader)
        return started

    def state_dict(self) -> dict[str, int]:
        """How many steps the stream has given out, whatever has been made ahead."""
        return {"given": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from there; the number of workers may differ."""
        self.close()
        self._next = state["given"]

    def close(self) -> None:
        """End the workers; the stream can continue, with new ones."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self._workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        self.close()


def _watch_the_rank(worker: int) -> None:
    """In a worker: leave when the rank is gone, for whatever reason."""
    rank, server = multiprocessing.parent_process(), os.getppid()
    assert rank is not None

    def leave() -> None:
        multiprocessing.connection.wait([rank.sentinel])
        if os.getppid() == server:  # what it was copied from is the rank's own, and would end more slowly
            os.kill(server, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
