"""Worker processes make the same batches ahead, for any number of workers; none outlives its stream."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import wait_for

from plait.comm import Comm, run
from plait.messages.ended import EndedError
from plait.run.data.batches import Batch
from plait.run.data.corpus import Epochs
from plait.run.data.packing import PackedBatches
from plait.run.data.windows import TextBatches
from plait.run.data.workers import StepDataset, StepStream
from plait.table.mesh import Mesh

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a test process may have one core
]

TEXT = bytes((i * i + i // 7) % 256 for i in range(1003))
STEPS = range(3, 10)


def dataset(data_rank: int = 1) -> StepDataset:
    documents = [TEXT[i : i + 5 + i % 40] for i in range(0, 1000, 45)]
    return StepDataset(Epochs(PackedBatches(documents, 13, seed=1)), data_rank, 2, 3, 7)


def same(found: list[list[Batch]], expected: list[list[Batch]]) -> bool:
    return len(found) == len(expected) and all(
        a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_a_stream_is_the_steps_one_after_the_other() -> None:
    source = dataset()
    with StepStream(source, STEPS) as stream:
        every = list(stream)
    assert same(every, [source.batches.microbatches(step, 1, 2, 3, 7) for step in STEPS])
    assert len({tuple(step[0]["tokens"].flatten().tolist()) for step in every}) > 3
    with pytest.raises(StopIteration):
        next(stream)


def test_workers_change_nothing_and_end_with_the_stream() -> None:
    expected = list(StepStream(dataset(), STEPS))
    state = torch.get_rng_state()
    with StepStream(dataset(), STEPS, workers=2) as stream:
        found = [next(stream)]
        assert len(multiprocessing.active_children()) == 2
        assert same(found + list(stream), expected)
        assert not multiprocessing.active_children(), "the last step ends the workers"
    assert torch.equal(state, torch.get_rng_state())


def test_ranks_that_are_threads_have_workers_of_their_own_and_a_failure_ends_them() -> None:
    expected = [list(StepStream(dataset(rank), range(2))) for rank in (0, 1)]

    def body(comm: Comm) -> list[list[Batch]]:
        with StepStream(dataset(comm.rank), range(9), workers=1) as stream:
            found = [next(stream), next(stream)]
            assert same(found, expected[comm.rank])
            comm.barrier(("shard",))
            if comm.rank == 1:
                raise RuntimeError("this rank has seen enough")
            comm.barrier(("shard",))
        return found

    with pytest.raises(RuntimeError, match="seen enough"):
        run(Mesh(shard=2), body, deadline=100)
    assert not multiprocessing.active_children()


def test_a_workers_error_is_the_ranks() -> None:
    source = StepDataset(TextBatches(TEXT, 10, seed=1), 0, 4, 3, 11)
    with (
        pytest.raises(ValueError, match="11 samples cannot fill 4 data ranks x 3 microbatches"),
        StepStream(source, range(3), workers=1) as stream,
    ):
        next(stream)
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torch opens ten, to see if it still can
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_is_named() -> None:
    with StepStream(dataset(), range(10**6), workers=1) as stream:
        next(stream)
        (worker,) = multiprocessing.active_children()
        worker.kill()
        with pytest.raises(EndedError, match=r"^a data worker of this rank has ended.*--workers 0"):
            list(stream)


KILLED = """
import multiprocessing
import sys
from plait.run.data import workers
from plait.run.data.windows import TextBatches
from plait.run.data.workers import StepDataset, StepStream
class Unsendable(TextBatches):
    def microbatches(self, *place):
        return [super().microbatches(*place), lambda: "stands for a batch for which /dev/shm has no room"]
if __name__ == "__main__":
    kind = Unsendable if "loses" in sys.argv else TextBatches
    workers.LONGEST = 9.0
    stream = StepStream(StepDataset(kind(bytes(100), 10, seed=0), 0, 1, 1, 4), range(9), workers=1)
    next(stream)
    print(multiprocessing.active_children()[0].pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_rank_leaves_no_worker_behind(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(KILLED)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        worker = int(rank.stdout.readline())
        os.kill(worker, 0)  # it runs
        rank.kill()
        rank.wait()
        wait_for(lambda: not Path(f"/proc/{worker}").exists(), 30)


def test_a_batch_that_cannot_be_handed_over_ends_the_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(KILLED)
    done = subprocess.run([sys.executable, str(tmp_path / "rank.py"), "loses"], capture_output=True, text=True)
    assert "EndedError: a data worker of this rank has ended" in done.stderr and "timed out" in done.stderr
