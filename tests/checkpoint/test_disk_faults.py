"""Folders that are full, gone or another one on some host: all ranks raise together."""

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mount, small_disk
from small_runs import build, go, ranks

import plait
from plait.checkpoint import writing
from plait.checkpoint.same_folder import check_same_folder
from plait.comm import Comm, run
from plait.comm.process_identity import Peer
from plait.table.mesh import AXES, Mesh

WIDE = (64, 1001)
MODES = pytest.mark.parametrize("background", [False, True])
SAYS = re.compile(
    r"(No space left|Read-only file system|vanished|No such file).*; need \d+ bytes, have \d+ bytes: '(.*)'"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One checkpoint fits on its two MiB."""
    with small_disk(tmp_path / "disk", "2m") as place:
        yield place


def saved(saver: plait.Saver) -> Path | None:
    go(saver.engine)
    saver.save()
    return saver.wait()


def failing(saver: plait.Saver, folder: Path) -> None:
    """All ranks raise, and say where; rank 0 says no less than what another rank tells."""
    with pytest.raises((OSError, RuntimeError)) as caught:
        saved(saver)
    found = SAYS.search(str(caught.value))
    assert found and found[2].startswith(str(folder)), caught.value
    saver.engine.comm.barrier(AXES)


def check_loads(folder: Path, before: list[Any]) -> None:
    """The checkpoint of step 1 has what every rank had then."""

    def body(comm: Comm) -> Any:
        engine = build(comm, 1.0, WIDE)
        assert plait.load(folder, engine).step == 1
        return engine.full_state_dict()

    for ours, theirs in zip(ranks(body), before, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@MODES
@pytest.mark.parametrize("fault", ["read-only", "vanished"])
def test_a_place_that_is_lost(disk: Path, background: bool, fault: str) -> None:
    folder = disk / "run"

    def body(comm: Comm) -> Any:
        saver = plait.Saver(folder, build(comm, 0.0, WIDE), background=background)
        saved(saver)
        state = saver.engine.full_state_dict()
        if not comm.rank and fault == "read-only":
            assert not mount("-o", "remount,ro", str(disk))
        elif not comm.rank:
            folder.rename(disk / "moved")
        comm.barrier(AXES)
        failing(saver, folder)
        return state

    before = ranks(body)
    check_loads(folder if fault == "read-only" else disk / "moved", before)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_folder_that_vanishes_while_it_is_written(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, gone = writing.write_tensor_file, threading.Event()

    def late(place: Any, tensors: Any) -> Any:
        path = Path(str(place))
        if path.name == f"rank-{rank:05d}.safetensors" and "step-000002" in path.parent.name:
            path.parent.rename(away := tmp_path.with_name(f"{tmp_path.name}-away"))  # at once: others write into it
            shutil.rmtree(away, ignore_errors=True)
            gone.set()
        return original(place, tensors)

    monkeypatch.setattr("plait.checkpoint.writing.write_tensor_file", late)

    def body(comm: Comm) -> Any:
        saver = plait.Saver(tmp_path, build(comm, 0.0, WIDE))
        saved(saver)
        state = saver.engine.full_state_dict()
        failing(saver, tmp_path)
        return state

    check_loads(tmp_path, ranks(body))
    assert gone.is_set()


def outcomes(folders: list[Path], hosts: str) -> list[str]:
    """The error of each rank, on its host and with its folder."""

    def body(comm: Comm) -> str:
        comm.peers = tuple(Peer(rank, host, 100 + rank) for rank, host in enumerate(hosts))
        try:
            check_same_folder(folders[comm.rank], comm)
        except (ValueError, RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run(Mesh(shard=len(hosts)), body, deadline=20)


def test_a_common_folder_is_no_matter_and_nothing_is_left(tmp_path: Path) -> None:
    assert outcomes([tmp_path] * 3, "aab") == [""] * 3
    assert outcomes([tmp_path, tmp_path / "none"], "aa") == [""] * 2, "one host: nothing is looked at"
    assert not list(tmp_path.iterdir())


def test_another_folder_is_named_with_its_host_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    zero, one, two = outcomes([tmp_path, tmp_path, tmp_path / "own"], "aab")
    assert two == (
        f"ValueError: {str(tmp_path / 'own')!r} on host b is not the folder that rank 0 writes to on host a: "
        "checkpoints need one that all hosts share"
    )
    assert all("on host b is not the folder" in said for said in (zero, one)), (zero, one)
    assert [entry.name for entry in tmp_path.iterdir()] == ["own"]


def test_a_folder_that_rank_0_cannot_write_to_is_an_error_of_all(tmp_path: Path) -> None:
    said = outcomes([tmp_path / "none"] * 2, "ab")
    assert all("No such file" in one for one in said), said
