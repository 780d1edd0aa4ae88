"""Hosts that see another folder than rank 0 are named before anything is trained."""

from __future__ import annotations

from pathlib import Path

from plait.checkpoint.same_folder import check_same_folder
from plait.comm import Comm, run
from plait.comm.process_identity import Peer
from plait.table.mesh import Mesh


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
