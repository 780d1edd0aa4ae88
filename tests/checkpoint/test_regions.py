"""Files of checkpoints: hashes, the bytes that a region takes, and the folders in which checkpoints are found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from small_runs import build, go, ranks

import plait
from plait.checkpoint import tensor_file
from plait.checkpoint.folder import CHECKPOINTS, OpenFile, all_of, find, opened
from plait.checkpoint.hashing import PART
from plait.checkpoint.stored import digest_of
from plait.checkpoint.tensor_file import TensorFile, safetensors_header, write_tensor_file
from plait.comm import Comm


@pytest.mark.parametrize("size", [0, 1, PART, 3 * PART + 5])
def test_writers_and_readers_make_the_same_digest(size: int, tmp_path: Path) -> None:
    values = torch.arange(size).to(torch.uint8)
    _, digest = write_tensor_file(tmp_path / "file", [((size,), values.dtype, values.split(1 << 21))])
    content = (tmp_path / "file").read_bytes()
    parts = [blake3(content[start : start + PART]).digest() for start in range(0, len(content), PART)]
    assert digest == blake3(b"".join(parts)).hexdigest()
    with opened(tmp_path / "file") as file:
        assert digest_of(file) == digest


@pytest.mark.parametrize("gap", [0, 50, 1 << 20])
@pytest.mark.parametrize("shape", [(7, 5, 3), (6, 4), (9,), ()])
def test_a_block_is_read_as_the_same_bytes_whatever_lies_between(
    shape: tuple[int, ...], gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "GAP", gap)
    monkeypatch.setattr(tensor_file, "CHUNK", 64)  # four rows of six
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    header, _, _ = safetensors_header({"w": (shape, whole.dtype)})
    path = tmp_path / "w.safetensors"
    path.write_bytes(header + whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    file = TensorFile(path)
    ends = [[(0, size), (1, size - 1), (size - 1, size), (2, 2)] for size in shape]
    for number in range(4 ** len(shape)):
        region = tuple(one[number // 4**dim % 4] for dim, one in enumerate(ends))
        read = torch.full([stop - start for start, stop in region], -1.0)
        file.fill("w", region, read)
        assert torch.equal(read, whole[tuple(slice(*pair) for pair in region)]), region


def test_a_rank_reads_the_bytes_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks load what three have saved: the files once for their hashes, and once for their regions."""

    def save(comm: Comm) -> Path:
        engine = build(comm)
        go(engine)
        return plait.save(tmp_path, engine)

    saved = ranks(save)[0]
    size = sum(file.stat().st_size for file in saved.glob("rank-*"))
    asked: list[int] = []
    read = OpenFile.read

    def counted(self: OpenFile, start: int, into: memoryview) -> None:
        if "rank" in self.path:
            asked.append(len(into))
        read(self, start, into)

    monkeypatch.setattr(OpenFile, "read", counted)

    def load(comm: Comm) -> Any:
        return plait.load(tmp_path, build(comm, 1.0)).path

    assert ranks(load)[0] == saved
    headers = 3 * 3 * 4096
    assert 2 * size <= sum(asked) + headers and sum(asked) <= 2 * size + headers


def test_the_newest_of_a_run_is_that_of_both_places(tmp_path: Path) -> None:
    """A conversion may have put one beside the folder in which the run saves."""
    for folder in ("step-000005", f"{CHECKPOINTS}/step-000004", f"{CHECKPOINTS}/step-000008"):
        (tmp_path / folder).mkdir(parents=True)
    assert [found.name for found in all_of(tmp_path)] == ["step-000004", "step-000005", "step-000008"]
    assert str(find(tmp_path)) == str(tmp_path / CHECKPOINTS / "step-000008")
