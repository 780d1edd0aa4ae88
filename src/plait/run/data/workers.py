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

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from plait.checkpoint.files.writing import told
from plait.messages.ended import EndedError
from plait.run.data.batches import Batch, Batches, on_device

LONGEST = 600.0
"""Seconds to wait for a batch before giving up."""


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


class StepStream(Iterator[list[Batch]], AbstractContextManager["StepStream"]):
    """One rank's microbatches, on ``device``, in the order of ``steps``; a context manager that closes its ``workers``,
    the processes that make them ahead.  0 makes each on request."""

    def __init__(self, dataset: StepDataset, steps: range, workers: int = 0, device: str = "cpu") -> None:
        self._device = device
        self._batches = _made_ahead(dataset, steps, workers) if workers else (dataset[step] for step in steps)

    def __next__(self) -> list[Batch]:
        return on_device(next(self._batches), self._device)

    def __exit__(self, *error: object) -> None:
        self._batches.close()


def _made_ahead(dataset: StepDataset, steps: range, workers: int) -> Generator[list[Batch]]:
    """The batches from worker processes, which start with the first and end with the last, or when this is closed."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        collate_fn=list,  # the microbatches as they are
        multiprocessing_context="spawn",  # a fork of a rank would have its threads' locks and its devices
        timeout=LONGEST,  # if a batch cannot be sent, Python's worker goes on silently
        generator=torch.Generator(),  # it seeds the workers and leaves torch's generator alone
    )
    with told("/dev/shm", 0):  # locks have their names there
        batches = iter(loader)
    try:
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        if str(error).startswith("Caught "):  # the source of the batches raised it there
            raise
        raise EndedError(
            f"a data worker of this rank has ended, or could not send a batch ({error}): memory, or room in /dev/shm, "
            f"may have run out; --workers 0 makes batches without it"
        ) from error
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]
