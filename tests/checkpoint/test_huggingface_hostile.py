"""Hugging Face folders that are damaged or malicious: one ValueError each."""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_folders as folders
import pytest
import torch
from hostile import changed, changed_text, header_of, with_header
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.messages.ended import OtherRankError
from plait.run.formats.huggingface import copied_files, open_folder, write_model, write_tensors
from plait.run.models.pretrained import Pretrained
from plait.step import Engine, empty_parameters
from plait.table.mesh import Mesh
from plait.zero.state.init import materialise

FILES = tuple(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


def build() -> nn.Module:
    with empty_parameters():
        return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))


def values() -> dict[str, Tensor]:
    shapes = {name: tuple(p.shape) for name, p in build().named_parameters()}
    return {name: torch.arange(float(torch.Size(s).numel())).view(s) + len(name) for name, s in shapes.items()}


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_tensors(folder, {n: (tuple(t.shape), t.dtype) for n, t in values().items()}, values().items(), limit=80)
    assert sorted(file.name for file in folder.iterdir()) == [*FILES, INDEX]
    return folder


def read(folder: Path) -> None:
    """All of it, and it is what was written."""
    model = build()
    materialise(model, 0, torch.device("cpu"), open_folder(folder, model))
    assert all(torch.equal(parameter, values()[name]) for name, parameter in model.named_parameters())


def index(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / INDEX).read_text())
        change(data)
        (folder / INDEX).write_text(json.dumps(data))

    return apply


def placed(place: Any) -> Callable[[Path], None]:
    return index(lambda data: data["weight_map"].update({"0.weight": place}))


def header(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        told, rest = header_of((folder / FILES[0]).read_bytes())
        change(told)
        (folder / FILES[0]).write_bytes(with_header(json.dumps(told), rest))

    return apply


def entry(**fields: Any) -> Callable[[Path], None]:
    return header(lambda told: told["0.weight"].update(fields))


def elsewhere(folder: Path, name: str = FILES[0]) -> Path:
    return (folder / name).rename(folder.parent / "elsewhere")


def twice(folder: Path) -> None:
    told, rest = header_of((folder / FILES[0]).read_bytes())
    text = json.dumps(told)[:-1] + ', "0.weight": ' + json.dumps(told["0.weight"]) + "}"
    (folder / FILES[0]).write_bytes(with_header(text, rest))


def swapped(folder: Path) -> None:
    (folder / FILES[0]).rename(folder / "x")
    (folder / FILES[1]).rename(folder / FILES[0])
    (folder / "x").rename(folder / FILES[1])


HARM: dict[str, tuple[Callable[[Path], Any], str]] = {
    "parent": (placed("../elsewhere.safetensors"), "not the name of a file in the folder"),
    "another kind": (placed("config.json"), "not the name of a file in the folder"),
    "a number": (placed(7), "no weight_map"),
    "deep": (lambda f: (f / INDEX).write_text('{"weight_map":' * 100_000), "nested too deeply"),
    "giant index": (lambda f: os.truncate(f / INDEX, 1 << 40), "it has more than 67,108,864 bytes"),
    "a link out": (lambda f: (f / FILES[0]).symlink_to(elsewhere(f)), "a link out of its folder"),
    "an index out": (lambda f: (f / INDEX).symlink_to(elsewhere(f, INDEX)), "a link out of its folder"),
    "a pipe for an index": (lambda f: (elsewhere(f, INDEX), os.mkfifo(f / INDEX)), "no plain file"),
    "missing": (elsewhere, "No such file"),
    "emptied": (lambda f: os.truncate(f / FILES[0], 0), "it has 0 bytes"),
    "truncated": (lambda f: os.truncate(f / FILES[0], 300), "copy the file again"),
    "longer": (lambda f: os.truncate(f / FILES[0], 1 << 40), "its tensors end at byte"),
    "swapped": (swapped, "and it is not"),
    "in two files": (lambda f: (f / FILES[1]).write_bytes((f / FILES[0]).read_bytes()), "drop one"),
    "twice in a header": (twice, "occurs twice"),
    "giant": (entry(shape=[1 << 40, 1 << 40]), "not a dtype, a shape and as many bytes"),
    "another shape": (entry(shape=[5, 3]), "has the shape (5, 3)"),
    "another dtype": (entry(dtype="I32"), "torch.int32"),
    "an unknown dtype": (entry(dtype="F128"), "which plait does not read"),
    "a header of lists": (header(lambda told: told.update({"0.weight": [1, 2]})), "not a dtype, a shape"),
    "a surplus tensor": (
        header(lambda told: told.update({"\x1b[31m": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})),
        "1 surplus [",
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_it_is_refused_in_words(harm: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    change, words = HARM[harm]
    change(folder)
    with pytest.raises(ValueError) as caught:
        read(folder)
    assert words in str(caught.value) and len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_links_within_the_folder_and_those_of_the_cache_are_followed(tmp_path: Path) -> None:
    snapshot = write(tmp_path / "models--a--b" / "snapshots" / "9f3c")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, name in enumerate([*FILES, INDEX]):
        (snapshot / name).rename(blobs / f"{number:064x}")
        (snapshot / name).symlink_to(Path("../../blobs") / f"{number:064x}")
    read(snapshot)
    (tmp_path / "mine").symlink_to(snapshot)
    read(tmp_path / "mine")
    inside = write(tmp_path / "inside")
    (inside / FILES[0]).rename(inside / "one.safetensors")
    (inside / FILES[0]).symlink_to("one.safetensors")
    read(inside)


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_random_harm_is_refused_or_what_was_written(first: int, tmp_path: Path) -> None:
    """Indices and headers changed at random: never another value, never another error."""
    folder, refused = write(tmp_path / "model"), 0
    whole = {name: (folder / name).read_bytes() for name in (*FILES, INDEX)}
    for seed in range(first, first + 60):
        draw = random.Random(seed)
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        name = draw.choice([*FILES, INDEX])
        told, rest = (json.loads(whole[INDEX]), b"") if name == INDEX else header_of(whole[name])
        before = copy.deepcopy(told)
        changed(told, draw)
        text = json.dumps(told) if draw.random() < 0.7 else changed_text(json.dumps(before), draw)
        encoded = text.encode(errors="surrogatepass")
        (folder / name).write_bytes(encoded if name == INDEX else with_header(text, rest, draw))
        try:
            open_folder(folder, build())
        except ValueError as error:
            refused += 1
            assert len(str(error)) < 2000 and str(error).isprintable(), (seed, str(error))
    assert refused > 40


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_all_ranks_with_their_name(value: float, tmp_path: Path) -> None:
    """Only one rank has such a weight, and would be alone with its error."""
    folder, shapes = tmp_path / "model", {n: (tuple(t.shape), t.dtype) for n, t in values().items()}
    folder.mkdir()
    harmed = values()
    harmed["2.weight" if "2.weight" in harmed else "1.weight"].view(-1)[-1] = value
    write_tensors(folder, shapes, harmed.items(), limit=80)
    with pytest.raises(ValueError, match=r"'1.weight' in '.*safetensors' has values that are not finite in its region"):
        read(folder)

    def body(comm: Comm) -> str:
        model = build()
        with pytest.raises((ValueError, OtherRankError), match=r"'1.weight' in .* not finite") as caught:
            Engine(model, comm, strategy="zero3", weights=open_folder(folder, model))
        return type(caught.value).__name__

    assert set(run(Mesh(shard=3), body, deadline=60)) == {"ValueError", "OtherRankError"}


ODD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda place: place.symlink_to("/dev/zero"),
    "a file from elsewhere": lambda place: place.symlink_to("/etc/hostname"),
    "a folder": Path.mkdir,
    "a loop": lambda place: place.symlink_to(place),
    "nested": lambda place: place.write_text('{"a":' * 100_000),
    "giant": lambda place: (place.touch(), os.truncate(place, 1 << 40)),
}


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_files_beside_the_weights_are_refused(file: str, odd: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folders.write(tmp_path)
    folders.write_tokenizer(folder)
    (folder / file).unlink()
    ODD[odd](folder / file)
    with pytest.raises(ValueError) as caught:
        Pretrained(str(folder)).config()
        Pretrained(str(folder)).encoder()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("odd", sorted({*ODD} - {"nested", "a folder"}))
def test_an_export_copies_plain_files_of_the_folder_and_nothing_else(odd: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = folders.write(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "a.jinja").write_text("x")
    with empty_parameters():
        model = Pretrained(str(source)).build()
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}

    def write(to: Path) -> None:
        write_model(to, model, shapes, ((name, torch.zeros(*shape)) for name, (shape, _) in shapes.items()), source)

    write(tmp_path / "plain")
    assert (tmp_path / "plain" / "additional_chat_templates" / "a.jinja").read_text() == "x"
    ODD[odd](source / "vocab.json")
    with pytest.raises(ValueError, match=r"vocab\.json"):
        write(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_what_an_export_copies_is_found_in_the_cache_too(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "9f3c", tmp_path / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (snapshot / "LICENSES").mkdir()
    blobs.mkdir()
    (blobs / "a1").write_text("x")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/a1")
    (snapshot / "additional_chat_templates" / "a.jinja").symlink_to("../../../blobs/a1")
    names = ("additional_chat_templates/a.jinja", "tokenizer.json")
    assert copied_files(snapshot) == dict.fromkeys(names, blobs / "a1")
    (snapshot / "vocab.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="a link out of its folder"):
        copied_files(snapshot)
    assert copied_files(None) == {}
