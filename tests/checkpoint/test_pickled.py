"""A pickle is read as data: no name in it runs, and no size in it allocates memory."""

import io
import os
import pickle
import shutil
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from plait.run.formats.dcp import import_dcp
from plait.run.formats.foreign_pickle import _layout, unpickled
from plait.run.formats.torch_folder import read_folder


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


MARK = "plait_was_here"
SHELL = f"touch {MARK}"

META = b"ctorch.distributed.checkpoint.metadata\n"
INDEX = META + b"MetadataIndex\n)\x81"
TOWER = b"K\x01" + b"\x85" * 100_000
"""A number in 100,000 tuples: hashing it would end the process."""

PROGRAMS: dict[str, bytes] = {
    "system": pickle.dumps(Calls(os.system, SHELL)),
    "system, protocol 2": pickle.dumps(Calls(os.system, SHELL), 2),
    "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nX\x08\x00\x00\x00__call__tR.",
    "in the state": b"ctorch\nSize\n)\x81" + pickle.dumps(Calls(os.system, SHELL), 2)[2:-1] + b"b.",
    "a method of what is allowed": b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93)R.",
    "INST": b"(S'" + SHELL.encode() + b"'\nios\nsystem\n.",
    "EXT": b"\x82\x01.",
    "a call of what was called": b"ctorch\nSize\n)R)R.",
    "a new value": b"K\x01)\x81.",
    "an attribute of a value": b"cbuiltins\ngetattr\nK\x01X\x04\x00\x00\x00real\x86R.",
    "an attribute of getattr": b"cbuiltins\ngetattr\ncbuiltins\ngetattr\nX\x08\x00\x00\x00__self__\x86R.",
    "a state for a dict": b"}}b.",
    "a state for a class": META + b"Metadata\nN}X\x04\x00\x00\x00sizeK\x01s\x86b.",
    "a state for a function": b"ctorch.serialization\n_get_layout\n}X\x05\x00\x00\x00cacheK\x01sb.",
    "a state that is no dict": INDEX + b"K\x01b.",
    "items of a number": b"K\x01K\x02K\x03s.",
    "a layout of its own": b"ctorch.serialization\n_get_layout\nX\x02\x00\x00\x00os\x85R.",
    "a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "a long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"j.",
    "a long number": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"\1.",
    "an array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"a.",
    "a tower as a key": b"}" + TOWER + b"K\x01s.",
    "a tower among keys": b"}(" + TOWER + b"K\x01u.",
    "a tower in a key": b"}" + INDEX + b"}X\x03\x00\x00\x00fqnNsX\x06\x00\x00\x00offset" + TOWER + b"sbK\x01s.",
    "a tower in a dict": b"ccollections\nOrderedDict\n]" + TOWER + b"K\x01\x86a\x85R.",
    "a tower as a member": META + b"_MEM_FORMAT_ENCODING\n" + TOWER + b"\x85R.",
    "a tower as a layout": b"ctorch.serialization\n_get_layout\n" + TOWER + b"\x85R.",
    "cut short": pickle.dumps({"a": [1.5, "b"]})[:-3],
    "nothing left": b".",
    "an unknown memo": b"h\x07.",
    "below a mark": b"(\x86.",
    "no mark": b"t.",
    "no text": b"\x80\x04X\x01\x00\x00\x00\xff.",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_that_a_pickle_says_is_run_or_allocated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a pickle cannot be read"):
            unpickled(PROGRAMS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1 << 25 if "tower" in name else 1 << 20)
    assert not list(tmp_path.iterdir())
    assert not hasattr(Metadata, "size") and not hasattr(_layout, "cache")


@pytest.mark.parametrize("field", ["relative_path", "offset", "length", "offsets", "sizes", "size", "chunks"])
def test_an_object_that_has_lost_a_field_is_damage(field: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    data, said = path.read_bytes(), bytes([len(field)]) + field.encode()  # a short text, after its length
    assert said in data
    path.write_bytes(data.replace(said, said[:-1] + b"?"))
    with pytest.raises(ValueError, match=f"{str(tmp_path)!r} cannot be read"):
        read_folder(tmp_path)


def test_a_far_memo_is_no_array() -> None:
    tracemalloc.start()
    assert unpickled(b"Nr" + struct.pack("<I", (1 << 32) - 1) + b".") is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_plain_values_are_what_they_were() -> None:
    value = {"a": [1, -2, 1 << 40, 2.5, True, None], "b": ("x", ("ü",), {}), 3: [[], ()], "n": torch.Size((3, 4))}
    for protocol in (3, 4, 5):
        assert unpickled(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_a_member_of_an_enumeration_is_read_as_every_python_writes_it(module: str) -> None:
    """3.11.0 to 3.11.3, among them Debian 12's, write ``getattr(class, name)``, others ``class(value)``."""
    own = "torch.distributed.checkpoint.metadata"
    said = f"c{module}\ngetattr\nc{own}\n_MEM_FORMAT_ENCODING\nX\x17\0\0\0TORCH_CONTIGUOUS_FORMAT\x86R.".encode(
        "latin-1"
    )
    assert unpickled(said).name == "TORCH_CONTIGUOUS_FORMAT"


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("torch") / "saved"
    state = {"model": {"w": torch.arange(12.0).view(3, 4)}, "epoch": 3}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def change(path: Path, meta: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(meta))


def record(value: Any, *, program: bytes = b"", compress: bool = False, size: int = 0) -> bytes:
    """As torch.save writes it, with another program or other bytes."""
    saved, made = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(made, "w", 8 if compress else 0) as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(
                name,
                program
                if program and name.endswith("data.pkl")
                else data[: -size or None]
                if "data/" in name
                else data,
            )
    return made.getvalue()


def with_record(path: Path, key: str, data: bytes) -> None:
    """Put a record in the place of another one, in a file of its own."""
    meta = metadata(path)
    (path / "__9_0.distcp").write_bytes(data)
    for index, info in meta.storage_data.items():
        if index.fqn == key:
            info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)
    change(path, meta)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ["model.w", "epoch"])
@pytest.mark.parametrize("name", ["system", "INST"])
def test_no_record_of_a_folder_runs_anything(
    key: str, name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(saved, tmp_path / "theirs")
    with_record(path, key, record(torch.ones(3, 4), program=PROGRAMS[name]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"refused by torch.load.*(global|GLOBAL|operand)"):
        import_dcp(path, tmp_path / "out")
    (path / ".metadata").write_bytes(PROGRAMS[name])
    with pytest.raises(ValueError, match=r"pickle|names"):
        import_dcp(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


def _info(path: Path, **changes: Any) -> None:
    meta = metadata(path)
    for index, info in meta.storage_data.items():
        if index.fqn == "model.w":
            vars(info).update(changes)
    change(path, meta)


def _chunks(path: Path, size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    meta = metadata(path)
    found = [ChunkStorageMetadata(torch.Size(offset), torch.Size(own)) for offset, own in chunks]
    meta.state_dict_metadata["model.w"] = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size(size), found
    )
    (info,) = (info for index, info in meta.storage_data.items() if index.fqn == "model.w")
    for offset, _ in chunks:
        meta.storage_data[MetadataIndex("model.w", offset)] = info
    change(path, meta)


def _link(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(path / "elsewhere")


def _flip(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[data.index(torch.tensor([9.0, 10.0]).numpy().tobytes()) + 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def _fifo(path: Path) -> None:
    (path / ".metadata").unlink()
    os.mkfifo(path / ".metadata")


FOLDERS: dict[str, Any] = {
    "above": (lambda path: _info(path, relative_path="../__0_0.distcp"), "not the name of a file"),
    "a link": (_link, "no file that can be read"),
    "a pipe": (_fifo, "no plain file"),
    "a bit": (_flip, "CRC-32"),
    "gone": (lambda path: (path / "__0_0.distcp").unlink(), "no file that can be read"),
    "far": (lambda path: _info(path, offset=1 << 40), "has a record at"),
    "negative": (lambda path: _info(path, offset=-5), "has a record at"),
    "short": (lambda path: _info(path, length=100), "damaged at byte"),
    "transformed": (lambda path: _info(path, transform_descriptors=["zstd"]), "compressed"),
    "giant": (lambda path: _chunks(path, (1 << 40, 1 << 20), ((0, 0), (1 << 40, 1 << 20))), "its tensors would have"),
    "a gap": (lambda path: _chunks(path, (4, 4), ((0, 0), (3, 4))), "overlap, or leave a gap"),
    "twice": (lambda path: _chunks(path, (6, 4), ((0, 0), (3, 4)), ((1, 0), (3, 4))), "overlap"),
    "dims": (lambda path: _chunks(path, (12,), ((0, 0), (3, 4))), "not a region of its shape"),
    "a bomb": (lambda path: with_record(path, "model.w", record(torch.ones(3, 4), compress=True)), "compressed files"),
    "cut": (lambda path: with_record(path, "model.w", record(torch.ones(3, 4), size=4)), "cannot be read"),
    "another shape": (lambda path: with_record(path, "model.w", record(torch.ones(4, 3))), "cannot be read"),
    "other metadata": (lambda path: change(path, Metadata({}, None, None)), "lacks fields of a Metadata"),
    "a text": (lambda path: change(path, "metadata"), "lacks fields of a Metadata"),
    "a function": (lambda path: with_record(path, "epoch", record(int)), "not an allowed global"),
    "a path": (lambda path: _paths(path, ("model", "w"), ("model", "w")), "two keys have the same path"),
    "a key": (lambda path: _paths(path, ("model", "a.b"), ("model", "a", "b")), "two of its paths make one key"),
    "a value above": (lambda path: _paths(path, ("model", "w"), ("model", "w", "b")), "both a value and keys below"),
    "a list": (lambda path: _paths(path, ("model", 0), ("model", 2)), "a list in it has gaps"),
}


def _paths(path: Path, *paths: tuple[str | int, ...]) -> None:
    meta = metadata(path)
    meta.planner_data.update(zip(("epoch", "model.w"), paths, strict=True))
    change(path, meta)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_folder_is_refused_in_a_line(name: str, saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "theirs")
    damage, says = FOLDERS[name]
    damage(path)
    with pytest.raises(ValueError, match=says):
        import_dcp(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
