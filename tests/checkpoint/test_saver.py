"""Saving while a run goes on: a save has the run at that moment, and all ranks get its errors."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_rank import each_rank
from run_cases import LAYOUTS, Training, differences
from small_runs import build, go, names, raised_together, ranks
from waiting import wait_for

import plait
from plait.checkpoint import writing
from plait.comm import Comm, run
from plait.table.mesh import AXES, Mesh


class Gate:
    """The file of one rank is written when the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
        self.open, self.reached, original = threading.Event(), threading.Event(), writing.write_tensor_file

        def gated(path: Any, tensors: Any) -> Any:
            if f"rank-{rank:05d}" in path.name:
                self.reached.set()
                assert self.open.wait(20)
            return original(path, tensors)

        monkeypatch.setattr("plait.checkpoint.writing.write_tensor_file", gated)


@pytest.mark.parametrize("where", LAYOUTS)
def test_what_is_saved_is_the_run_at_that_moment(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before the run has gone on for two more steps; resumed from there it makes the same ones."""
    gate = Gate(monkeypatch, rank=0)

    def straight(comm: Comm) -> Any:
        training = Training.begin(comm, where)
        training.go(0, 2)
        note = torch.arange(3.0)
        with plait.Saver(tmp_path, training.engine, ema=training.ema) as saver:
            saver.save(extra={"schedule": training.schedule.state_dict(), "note": note, "at": (1, None)})
            at = training.state()
            losses = training.go(2, 4)
            note += 1
            gate.open.set()
        return at, losses, training.state()

    def resumed(comm: Comm) -> Any:
        training = Training.begin(comm, where, change=1)
        loaded = training.load(tmp_path)
        assert torch.equal(loaded.extra["note"], torch.arange(3.0))
        assert (loaded.path, loaded.step, loaded.extra["at"]) == (tmp_path / "step-000002", 2, (1, None))
        at = training.state()
        return at, training.go(2, 4), training.state()

    mesh = Mesh.parse(LAYOUTS[where][0])
    first = run(mesh, straight, deadline=30)
    assert not differences(run(mesh, resumed, deadline=30), first)
    assert (tmp_path / "latest").read_text() == "step-000002\n"


def test_a_second_save_waits_for_the_first_and_uses_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> Any:
        engine = build(comm)
        saver = plait.Saver(tmp_path, engine)
        assert saver.wait() is None
        go(engine)
        saver.save()
        assert names(tmp_path) != ["latest", "step-000001"]
        memory = saver._memory.buffer.data_ptr()
        go(engine)
        if not comm.rank:
            threading.Timer(0.3, gate.open.set).start()
        saver.save()
        assert (comm.rank or saver.waited > 0.2) and (tmp_path / "step-000001").is_dir()
        assert saver.wait() == saver.wait() == tmp_path / "step-000002"
        assert saver._memory.buffer.data_ptr() == memory
        return engine.full_state_dict()

    saved = ranks(body)

    def load(comm: Comm) -> Any:
        engine = build(comm, change=1)
        plait.load(tmp_path, engine)
        return engine.full_state_dict()

    assert not differences(ranks(load), saved)


@pytest.mark.parametrize("broken", range(3))
def test_what_a_thread_could_not_write_all_ranks_raise_later(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = writing.write_tensor_file

    def failing(path: Any, tensors: Any) -> Any:
        if path.name == f"rank-{broken:05d}.safetensors" and "step-000001" in path.parent.name:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return original(path, tensors)

    monkeypatch.setattr("plait.checkpoint.writing.write_tensor_file", failing)

    def body(comm: Comm) -> None:
        engine = build(comm)
        saver = plait.Saver(tmp_path, engine)
        saver.save()
        go(engine)
        saver.save()
        go(engine)
        with pytest.raises((OSError, RuntimeError), match=r"No space left.*; need \d+ bytes, have \d+"):
            saver.save() if broken else saver.wait()
        comm.barrier(AXES)
        assert names(tmp_path) == ["latest", "step-000000"]
        comm.barrier(AXES)
        saver.save()  # it goes on
        assert saver.wait() == tmp_path / "step-000002"

    ranks(body)
    assert names(tmp_path) == ["latest", "step-000000", "step-000002"]


@each_rank("shard=3")
def test_large_weights_whose_sum_is_not_finite_are_saved(comm: Comm, tmp_path: Path) -> None:
    engine = build(comm)
    for piece in engine.placed.pieces():
        piece.tensor.fill_(3e38)
    with plait.Saver(tmp_path, engine) as saver:
        saver.save()
    assert saver.wait() == tmp_path / "step-000000"


def test_a_rank_that_does_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> None:
        saver = plait.Saver(tmp_path, build(comm), deadline=0.5)
        saver.save()
        try:
            saver.wait()
        finally:
            gate.open.set()

    said = raised_together(body, "rank")
    assert any("s for rank 1 to write" in one for one in said) or any("rank 1 has not written" in one for one in said)


def test_an_error_in_the_block_is_not_held_up_and_the_save_is_finished(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        with plait.Saver(tmp_path, build(comm)) as saver:
            saver.save()
            if comm.rank == 1:
                raise ArithmeticError("a rank's own error")

    with pytest.raises(ArithmeticError):
        ranks(body)
    join_threads()
    assert names(tmp_path) == ["latest", "step-000000"]


def test_a_program_that_has_ended_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 never writes, and rank 0's thread waits for its deadline."""
    gate, printed = Gate(monkeypatch), list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", printed.append)
    ranks(lambda comm: plait.Saver(tmp_path, build(comm), deadline=1).save())
    join_threads(but=1)
    gate.open.set()
    join_threads()
    assert [type(found.exc_value) for found in printed] == [TimeoutError], "nobody asks, so it is printed"
    assert len(names(tmp_path)) == 1 and names(tmp_path)[0].endswith(".partial")


def join_threads(but: int = 0) -> None:
    """Wait until no more than so many threads write."""
    wait_for(lambda: sum(thread.name == "plait.save" for thread in threading.enumerate()) <= but, 20)


def keep(path: Path, steps: int, count: int, then: Callable[[int], Any] = lambda step: None) -> None:
    def body(comm: Comm) -> None:
        engine = build(comm)
        saver = plait.Saver(path, engine, keep=count)
        for step in range(1, steps + 1):
            go(engine)
            saver.save()
            saver.wait()
            if not comm.rank:
                then(step)
            comm.barrier(AXES)

    ranks(body)


def test_the_newest_few_are_kept_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    def then(step: int) -> None:
        if step == 1:
            (tmp_path / "step-000000").mkdir()  # no checkpoint
            (tmp_path / "step-000009").mkdir()
            (tmp_path / "notes").write_text("mine")
        if step == 2:
            (tmp_path / "step-000002").rename(tmp_path / "best")
        if step == 3:
            (tmp_path / "step-000002").symlink_to(tmp_path / "best")

    keep(tmp_path, 6, 2, then)
    others = ["best", "latest", "notes", "step-000000", "step-000002", "step-000009"]
    assert names(tmp_path) == sorted([*others, "step-000005", "step-000006"])
    with pytest.raises(ValueError, match="keep=0"):
        keep(tmp_path, 1, 0)


def test_nothing_is_removed_before_the_newest_has_been_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 2, 3)
    original = writing.publish

    def damaging(*given: Any) -> Any:
        published = original(*given)
        file = published / "rank-00002.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return published

    monkeypatch.setattr("plait.checkpoint.writing.publish", damaging)

    def body(comm: Comm) -> None:
        engine = build(comm)
        plait.load(tmp_path, engine)
        go(engine)
        with plait.Saver(tmp_path, engine, keep=1) as saver:
            saver.save()

    raised_together(body, "rank-00002.safetensors' is not what was written")
    assert names(tmp_path) == ["latest", "step-000001", "step-000002", "step-000003"]


def test_a_folder_that_was_emptied_is_saved_to_again(tmp_path: Path) -> None:
    """Old checkpoints are removed by hand while the run goes on."""

    def body(comm: Comm) -> None:
        saver = plait.Saver(tmp_path / "run", build(comm), background=False)
        for _ in range(2):
            go(saver.engine)
            saver.save()
            if not comm.rank:
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").mkdir()
            comm.barrier(AXES)
        go(saver.engine)
        saver.save()

    ranks(body)
    assert names(tmp_path / "run") == ["latest", "step-000003"]
