"""Objects under a URL, where nothing is renamed: a checkpoint is there when its manifest is, which comes last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from run_cases import differences
from small_runs import build, go, ranks, state

import plait
from plait.checkpoint.folder import Folder
from plait.checkpoint.objects import Objects, OpenObject
from plait.checkpoint.places import CHECKPOINTS, all_of, checkpoints, find, place
from plait.checkpoint.tensor_file import TensorFile, safetensors_header
from plait.comm import Comm, run
from plait.table.mesh import Mesh


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield tmp_path.as_uri() + "/run"
        return
    yield "memory://test/run"
    fsspec.filesystem("memory").store.clear()


def objects(url: str) -> Any:
    """The store, and the path in it."""
    found = place(url)
    assert isinstance(found, Objects)
    return found.store, found.path


def saved(url: str, steps: int = 1, extra: Any = None) -> Any:
    """Go on with what is there, if anything is, by so many steps, each saved; what has become of the state."""

    def body(comm: Comm) -> Any:
        engine = build(comm)
        if checkpoints(place(url)):
            plait.load(url, engine)
        for _ in range(steps):
            go(engine)
            assert plait.save(url, engine, extra=extra) == f"{url}/step-{engine.steps:06d}"
        return state(engine)

    return ranks(body)[0]


def loads(url: str, **settings: Any) -> Any:
    def body(comm: Comm) -> Any:
        engine = build(comm, 1.0, **settings)
        loaded = plait.load(url, engine)
        return loaded.path, loaded.extra, state(engine)

    return ranks(body, 2)[0]


@pytest.mark.parametrize("row", ["zero3", "ddp"])
def test_a_run_goes_through_a_store_into_any_layout(url: str, row: str) -> None:
    before = saved(url, 2, {"numbers": torch.arange(4)})
    path, extra, after = loads(url, strategy=row)
    assert path == f"{url}/step-000002" and extra["numbers"].tolist() == [0, 1, 2, 3]
    assert differences(after, before) == []
    assert loads(f"{url}/step-000001")[2][2]["step"] == 1
    store, root = objects(url)
    assert store.cat_file(f"{root}/latest") == b"step-000002\n"


def refused(url: str, words: str) -> None:
    def body(comm: Comm) -> str:
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            plait.load(url, build(comm))
        return str(caught.value)

    assert all(words in said for said in ranks(body)), words


def test_what_is_damaged_in_a_store_is_refused_and_the_one_before_offered(url: str) -> None:
    saved(url, 2)
    store, root = objects(url)
    for path in sorted(store.ls(f"{root}/step-000002", detail=False)):
        data = store.cat_file(path)
        store.pipe_file(path, data[:-9] + b"x" + data[-8:])
        refused(url, f"the one before it is '{url}/step-000001'")
        store.pipe_file(path, data)
    file = sorted(store.ls(f"{root}/step-000002", detail=False))[-1]
    store.rm_file(file)
    refused(url, "is no file that can be read")


def test_what_an_ended_save_has_left_is_no_checkpoint_and_goes(url: str) -> None:
    """Of a save that ended before its manifest, at the step that is saved next and at another one."""
    saved(url)
    store, root = objects(url)
    begun = place(url).partial("step-000002", "00ff")
    begun.begin()
    begun.file(1, "safetensors").put(b"half")
    later = place(url).partial("step-000007", "00fe")
    later.begin()
    later.file(0, "json").put(b"{}")
    assert loads(url)[0] == f"{url}/step-000001"
    saved(url)
    assert not any(own in path for path in store.find(root) for own in (".00ff.", ".00fe."))
    assert loads(url)[0] == f"{url}/step-000002"


def test_two_saves_at_once_share_no_file_and_one_of_them_is_there(url: str) -> None:
    """A run that was taken for dead goes on writing while its successor saves the same step."""
    old = place(url).partial("step-000001", "0a0a")
    old.begin()
    old.file(0, "safetensors").put(b"first")
    saved(url)
    with pytest.raises(OSError, match="another run saves in the same place"):
        old.publish("{}", [old.file(0, "safetensors").name])
    old.file(0, "safetensors").put(b"first again")
    with pytest.raises(ValueError, match="exists already"):
        old.publish("{}", [old.file(0, "safetensors").name])
    old.discard()
    assert loads(url)[0] == f"{url}/step-000001"


def test_one_that_goes_is_no_checkpoint_from_the_first_moment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(url, 2)
    first, second = checkpoints(place(url))
    store, _ = objects(url)
    removed: list[str] = []
    remove = store.rm_file
    with monkeypatch.context() as patched:
        patched.setattr(store, "rm_file", lambda path: (removed.append(path), remove(path)))
        second.discard()
    assert removed[0].endswith("step-000002/manifest.json") and checkpoints(place(url)) == [first]


def test_a_store_that_fails_is_said_by_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(url)
    store, _ = objects(url)

    class RefusedError(Exception):
        """As stores raise their own."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RefusedError("no credentials")

    monkeypatch.setattr(type(store), "cat_file", refuse)
    refused(url, "RefusedError: no credentials")
    monkeypatch.undo()
    opened = type(store).open
    writing = lambda self, path, mode="rb", **more: (refuse if "w" in mode else opened)(self, path, mode, **more)  # noqa: E731
    monkeypatch.setattr(type(store), "open", writing)

    def body(comm: Comm) -> str:
        engine = build(comm)
        plait.load(url, engine)
        go(engine)
        with pytest.raises((OSError, RuntimeError)) as caught:
            plait.save(url, engine)
        return str(caught.value)

    assert all("RefusedError: no credentials" in said for said in ranks(body))
    monkeypatch.undo()
    assert loads(url)[0] == f"{url}/step-000001"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere://bucket/run", "Protocol not known: nowhere"),
        ("simplecache::memory://run", "is a chain of URLs"),
        ("memory://nothing/here", "there is no checkpoint in 'memory://nothing/here'"),
    ],
)
def test_a_url_that_leads_nowhere_is_one_message(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        run(Mesh(shard=1), lambda comm: plait.load(url, build(comm)), deadline=20)
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_store_whose_package_is_missing_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ValueError, match=r"Install s3fs to access S3; install plait\[fsspec\]"):
        place("s3://bucket/run")


@pytest.mark.parametrize("gap", [0, 50, 1 << 20])
@pytest.mark.parametrize("shape", [(7, 5, 3), (6, 4), (9,), ()])
def test_a_block_is_read_as_the_same_bytes_whatever_lies_between(
    shape: tuple[int, ...], gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "gap", gap)
    monkeypatch.setattr(Folder, "chunk", 100)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    header, _, _ = safetensors_header({"w": (shape, whole.dtype)})
    path = tmp_path / "w.safetensors"
    path.write_bytes(header + whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    file = TensorFile(Folder(path))
    ends = [[(0, size), (1, size - 1), (size - 1, size), (2, 2)] for size in shape]
    for number in range(4 ** len(shape)):
        region = tuple(one[number // 4**dim % 4] for dim, one in enumerate(ends))
        read = torch.full([stop - start for start, stop in region], -1.0)
        file.fill("w", region, read)
        assert torch.equal(read, whole[tuple(slice(*pair) for pair in region)]), region


def test_a_rank_reads_the_bytes_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks load what two have saved: at most the files, once for their hashes and once for their regions."""
    saved("memory://bytes/run")
    store, root = objects("memory://bytes/run")
    size = sum(store.info(path)["size"] for path in store.find(f"{root}/step-000001") if "rank" in path)
    asked: list[int] = []
    read = OpenObject.read

    def counted(self: OpenObject, start: int, into: memoryview) -> None:
        if "rank" in self.place.name:
            asked.append(len(into))
        read(self, start, into)

    monkeypatch.setattr(OpenObject, "read", counted)
    loads("memory://bytes/run")
    headers = 3 * 2 * 4096
    assert 2 * size <= sum(asked) + headers and sum(asked) <= 2 * size + headers
    store.store.clear()


@pytest.mark.parametrize("name", ["manifest.json", ".json"])
def test_an_object_that_is_put_in_part_is_not_there(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest or a note of which half is written when the store fails, or when somebody looks."""
    saved(url)
    store, root = objects(url)
    whole = type(store).pipe_file

    def half(self: Any, path: str, value: bytes, **options: Any) -> None:
        if name in path.rpartition("/")[2] and "step-000002" in path:
            whole(self, path, value[: len(value) // 2], **options)
            raise OSError("no answer")
        whole(self, path, value, **options)

    monkeypatch.setattr(type(store), "pipe_file", half)
    with pytest.raises((OSError, RuntimeError), match="no answer"):
        saved(url)
    monkeypatch.undo()
    assert [folder.name for folder in checkpoints(place(url))] == ["step-000001"]
    saved(url)
    left = [path.rpartition("/")[2] for path in store.ls(f"{root}/step-000002", detail=False)]
    assert sorted(left)[0] == "manifest.json" and not [one for one in left if one.endswith(".part")]


def test_a_run_s_folder_leads_to_its_checkpoints(url: str) -> None:
    saved(f"{url}/checkpoints")
    assert loads(url)[0] == f"{url}/checkpoints/step-000001"


def test_the_newest_of_a_run_is_that_of_both_places(tmp_path: Path) -> None:
    """A conversion may have put one beside the folder in which the run saves."""
    for folder in ("step-000005", f"{CHECKPOINTS}/step-000004", f"{CHECKPOINTS}/step-000008"):
        (tmp_path / folder).mkdir(parents=True)
    assert [found.name for found in all_of(tmp_path)] == ["step-000004", "step-000005", "step-000008"]
    assert str(find(tmp_path)) == str(tmp_path / CHECKPOINTS / "step-000008")
