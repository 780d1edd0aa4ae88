"""Damage, malice, numbers that are not finite, other models: all ranks refuse them, and the checkpoint before loads."""

import copy
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from run_cases import differences
from small_runs import build, go, names, raised_together, ranks
from torch import nn

import plait
from plait.checkpoint.files.writing import Lines
from plait.checkpoint.manifest import signed
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm
from plait.step import Engine

FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors", "manifest.json")


def two(path: Path) -> None:
    """Checkpoints of steps 1 and 2."""

    def body(comm: Comm) -> None:
        engine = build(comm)
        for _ in range(2):
            go(engine)
            plait.save(path, engine, extra={"word": "here", "numbers": torch.arange(4)})

    ranks(body)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("saved")
    two(path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def refusals(path: Path, **settings: Any) -> list[str]:
    """The error of each rank; none has changed anything."""

    def body(comm: Comm) -> str:
        engine = build(comm, **settings)
        before = engine.full_state_dict()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            plait.load(path, engine)
        after = engine.full_state_dict()
        assert engine.steps == 0 and all(torch.equal(after[name], before[name]) for name in before)
        return str(caught.value)

    return ranks(body)


def test_the_one_before_loads(copied: Path) -> None:
    assert ranks(lambda comm: plait.load(copied / "step-000001", build(comm)).step) == [1, 1, 1]
    assert ranks(lambda comm: plait.load(copied, build(comm)).step) == [2, 2, 2]
    (copied / "latest").write_text("step-000001\n")  # a run may end between the rename and this line
    assert ranks(lambda comm: plait.load(copied, build(comm)).step) == [2, 2, 2]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _swap(path: Path) -> None:
    other = path.with_name(FILES[(FILES.index(path.name) + 1) % 3])
    data = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(data)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": _flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "deleted": lambda path: path.unlink(),
    "of another save": lambda path: shutil.copy(path.parent.with_name("step-000001") / path.name, path),
    "swapped": _swap,
    "a link": _link,
    "a pipe": _pipe,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


DAMAGED = [(d, file) for d in DAMAGES for file in (FILES[1], FILES[3]) if (d, file) != ("swapped", FILES[3])]


@pytest.mark.parametrize(("damage", "file"), DAMAGED)
def test_a_damaged_file_is_named_and_the_checkpoint_before_offered(damage: str, file: str, copied: Path) -> None:
    DAMAGES[damage](copied / "step-000002" / file)
    for said in refusals(copied):
        assert str(copied / "step-000002") in said and f"the one before it is '{copied / 'step-000001'}'" in said
        assert file in said or (damage, file) == ("of another save", FILES[3]) or damage == "swapped"
        assert ("it has pieces of " in said and "1.weight'" in said) or file == FILES[3]


@pytest.mark.parametrize("seed", range(5))
def test_no_bit_of_any_file_can_flip_unseen(seed: int, copied: Path) -> None:
    """The checks that each load makes first; one engine after the other would take minutes."""
    folder = copied / "step-000002"
    draw, read = random.Random(seed), Checkpoint.find(folder)
    for _ in range(200):
        path = folder / draw.choice(FILES)
        data = path.read_bytes()
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=path.name):
            read.check_file(path.name) if path.name in read.manifest.files else Checkpoint.find(folder)
        path.write_bytes(data)


def _piece(data: Any) -> Any:
    return data["tensors"]["model/0.weight"]["pieces"][0]


def _entry(name: str) -> Callable[[Any], Any]:
    def change(data: Any) -> None:
        data["files"][name] = data["files"].pop(FILES[0])
        for tensor in data["tensors"].values():
            for piece in tensor["pieces"]:
                piece["file"] = name if piece["file"] == FILES[0] else piece["file"]

    return change


def _value(data: Any, name: str) -> Any:
    return next(value for key, value in data["values"]["dict"] if key == name)


def _set(key: str, value: Any, of: Callable[[Any], Any] = lambda data: data) -> Callable[[Any], Any]:
    return lambda data: of(data).__setitem__(key, value)


WRONG: dict[str, Callable[[Any], Any] | tuple[str, str]] = {
    "parent": _entry("../rank-00000.safetensors"),
    "negative": _set("region", [[-1, 1], [0, 5]], _piece),
    "giant shape": _set("shape", [1 << 40, 1 << 40], lambda data: data["tensors"]["model/0.weight"]),
    "overlapping": lambda data: data["tensors"]["model/0.weight"]["pieces"].append(dict(_piece(data))),
    "a gap": lambda data: data["tensors"]["model/0.weight"]["pieces"].pop(),
    "a region of numbers": _set("region", [0, 1], _piece),
    "a region of booleans": _set("region", [[False, True], [0, 5]], _piece),
    "another key": _set("key", "99", _piece),
    "an unknown file": _set("file", "rank-00009.safetensors", _piece),
    "another dtype": _set("dtype", "float16", lambda data: data["tensors"]["model/0.weight"]),
    "no dtype": _set("dtype", "nn", lambda data: data["tensors"]["model/0.weight"]),
    "a list": lambda data: data.__setitem__("tensors", []),
    "a step of -1": _set("step", -1),
    "another step": _set("step", 7),
    "another format": _set("format", 5),
    "a surplus field": _set("more", 1),
    "another number of optimizers": lambda data: _value(data, "optimizer_classes").append("AdamW < Adam"),
    "an optimizer that is no word": lambda data: _value(data, "optimizer_classes").__setitem__(0, 1),
    "no values": _set("values", None),
    "a wrong value": _set("values", {"dict": [[["a"], 1]]}),
    "a number beyond its dtype": _set("values", {"number": 1 << 70, "dtype": "int64"}),
    "nan as an integer": _set("values", {"number": {"float": "nan"}, "dtype": "int64"}),
    "a tensor that is not there": _set("values", {"tensor": "x"}),
    "a surplus tensor": lambda d: d["tensors"].__setitem__("model/more", {"dtype": "int8", "shape": [0], "pieces": []}),
    "twice": ('"step": 2', '"step": 2, "step": 2'),
    "deep": ('"values": ', f'"values": {"[" * 100_000}{"]" * 100_000}, "more": '),
    "no number": ('"step": 2', '"step": NaN'),
    "no end": ('"step": 2', '"step": "2'),
}
"""Damage to the values of a manifest, or to its text."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_manifest_that_says_something_else_is_refused(wrong: str, copied: Path) -> None:
    """Its SHA-256 is right: it was not damaged, it was made."""
    path = copied / "step-000002" / "manifest.json"
    text, change = path.read_text(), WRONG[wrong]
    if isinstance(change, tuple):
        text = text.replace(*change, 1)
    else:
        data = json.loads(text)
        change(data)
        text = json.dumps(data)
    path.write_text(signed(text))
    for said in refusals(copied):
        assert len(said) < 1000


def test_another_model_or_run_is_refused_before_anything_is_changed(copied: Path) -> None:
    assert all("has shape" in said for said in refusals(copied, sizes=(5, 8)))
    assert all("seed" in said for said in refusals(copied, seed=3))
    assert all("loss scale" in said for said in refusals(copied, loss_scale=plait.LossScale()))
    assert all("there is no checkpoint in" in said for said in refusals(copied.parent / "nowhere"))

    def another(comm: Comm) -> None:
        engine = build(comm)
        with pytest.raises(ValueError, match="average of the weights"):
            plait.load(copied, engine, ema=plait.EMA(engine))
        model = nn.Linear(5, 5)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        with pytest.raises(ValueError, match="2 tensors are missing"):
            plait.load(copied, Engine(model, comm, strategy="ddp"))

    ranks(another)
    copy = shutil.copytree(copied / "step-000001", copied / "step-000009")
    assert all(f"'{copy}' has step 1 in it, so it is a copy" in said for said in refusals(copied))
    copy.rename(copied / "best")
    assert ranks(lambda comm: plait.load(copied / "best", build(comm)).step) == [1, 1, 1]


def test_a_checkpoint_may_be_moved_and_renamed(copied: Path) -> None:
    moved = (copied / "step-000002").rename(copied.parent / "best")
    assert ranks(lambda comm: plait.load(moved, build(comm)).path) == [moved] * 3
    _flip(moved / FILES[0])
    assert all("there is none before it" in said for said in refusals(moved))


@pytest.mark.parametrize("background", [True, False])
def test_optimizer_state_that_is_not_finite_is_never_the_newest(background: bool, tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        engine = build(comm)
        saver = plait.Saver(tmp_path, engine, keep=1, background=background)
        go(engine)
        saver.save()
        go(engine)
        if comm.rank == 2:
            next(piece for piece in engine.placed.pieces() if piece.key).tensor.view(-1)[-1] = torch.nan
        saver.save()
        saver.wait()

    raised_together(body, "'optimizer/exp_avg/1.weight' has values that are not finite")
    assert names(tmp_path) == ["latest", "step-000001"]


def test_what_cannot_be_saved_leaves_what_was_there(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def saver(change: Callable[[Engine], Any], extra: Any = None) -> Callable[[Comm], Any]:
        def body(comm: Comm) -> None:
            engine = build(comm)
            plait.load(copied, engine)
            change(engine)
            plait.save(copied, engine, extra=extra)

        return body

    def spoil(engine: Engine) -> None:
        go(engine)
        if engine.comm.rank == 2:
            next(engine.placed.pieces()).tensor.fill_(torch.inf)

    other = copied / ".step-000003.ab.partial"
    other.mkdir()
    lock = Lines(other / "lock")
    raised_together(saver(go), f"another run is saving to {str(copied)!r}, step-000003: give each run")
    assert other.exists()
    lock.close()
    before = names(copied)
    raised_together(saver(lambda engine: None), "exists already")
    raised_together(saver(spoil), "not finite")
    raised_together(saver(go, extra={"a": {1, 2}}), "builtins.set cannot be saved")
    raised_together(saver(lambda engine: engine.model(torch.ones(2, 5))), "in the middle of a step")

    def no_manifest(*_: Any) -> None:
        raise OSError(5, "Input/output error", "manifest.json")

    monkeypatch.setattr("plait.checkpoint.writing.publish", no_manifest)
    raised_together(saver(go), "Input/output error")
    assert names(copied) == [name for name in before if name != other.name], "of a run that was interrupted"
    monkeypatch.undo()
    assert ranks(lambda comm: plait.load(copied, build(comm)).step) == [2, 2, 2]


# ---- malice ---------------------------------------------------------------------------------------------------------

MOST_BYTES = 4 << 20
"""Memory of Python's that any of these loads may take; the checkpoint has a few kilobytes."""


def play(folder: Path) -> None:
    def body(comm: Comm) -> None:
        engine = build(comm, 1.0, sizes=(3, 7))
        ema = plait.EMA(engine, 0.9)

        def state() -> Any:
            whole = engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()
            return copy.deepcopy((*whole, ema.full_state_dict(), ema.decay))

        before = state()
        try:
            plait.load(folder, engine, ema=ema)
        except ValueError as error:
            assert len(str(error)) < 2000 and str(error).isprintable(), f"unclear: {str(error)[:3000]!r}"
            assert not differences(state(), before), error

    ranks(body, 1)


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_random_harm_is_refused_or_loaded(first: int, tmp_path: Path) -> None:
    hostile.write(tmp_path / "good")
    for seed in range(first, first + 40):
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / "run"))
        kind = hostile.spoil(folder / "step-000001", random.Random(seed))
        tracemalloc.start()
        try:
            play(folder)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        except BaseException as error:
            error.add_note(f"seed {seed}: {kind}")
            raise
        finally:
            tracemalloc.stop()
        shutil.rmtree(folder)
