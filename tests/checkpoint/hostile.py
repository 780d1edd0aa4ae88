"""Malicious checkpoints: changed at random, and signed again so that every hash is right."""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from small_runs import build, go, ranks

import plait
from plait.checkpoint.hashing import HASH, Hasher
from plait.checkpoint.manifest import signed
from plait.comm import Comm

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 7, -1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, 10**4298, 1.5, -0.0, 1e308),
    *("", "0", "nan", "../rank-00000.safetensors", "/etc/passwd", "rank-00001.safetensors", "manifest.json", "a\0b"),
    *("\ud800", "model/0.weight", "value/0", "float32", "F64", "int8", "x" * 10_000, "\x1b[31m", [], {}, [[]], [0, 0]),
    *([[0, 1 << 62]], [1 << 40, 1 << 40], [0] * 70, [1] * 5000, [2] * 64, [10**300] * 2000, [1], {"float": "inf"}),
    *({"tensor": "model/0.weight"}, {"tensor": "value/0"}, {"tuple": [{"tensor": "value/0"}] * 50}),
    *({"number": value, "dtype": "int8"} for value in (10**30, 1.0, -1, {"float": "nan"})),
    *({"dict": [[{"dict": []}, 1]]}, {"dict": [["step", 1]]}, {"counter": [["a", "b"]]}),
]


def write(path: Path) -> None:
    """A good one, of two ranks."""

    def body(comm: Comm) -> None:
        engine = build(comm, sizes=(3, 7))
        ema = plait.EMA(engine, 0.9)
        go(engine)
        plait.save(path, engine, ema=ema, extra={"numbers": torch.arange(4), "at": (1, None, 0.5, {"a": [1]})})

    ranks(body, 2)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of the parts of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        yield from nodes(inside, (*path, key))


def changed(data: Any, draw: random.Random) -> None:
    """One part is another value, gone, twice, elsewhere, or under another name."""
    places = list(nodes(data))
    depth = draw.randint(1, 7)  # as often near the top as far below
    if not (near := [place for place in places if len(place) <= depth]):
        return  # an earlier change has left nothing
    *path, key = draw.choice(near)
    holder = data
    for step in path:
        holder = holder[step]
    value = copy.deepcopy(draw.choice(VALUES))
    match draw.choice(["value", "value", "number", "gone", "twice", "moved", "renamed"]):
        case "number" if type(holder.get(key) if isinstance(holder, dict) else holder[key]) is int:
            holder[key] += draw.choice([-1, 1, 4, -8, 1 << 33])
        case "gone":
            del holder[key]
        case "twice" if isinstance(holder, list):
            holder += [copy.deepcopy(holder[key])] * draw.choice([1, 50 if len(str(holder)) < 2000 else 1])
        case "moved":
            other = data
            for step in draw.choice(places or [()]):
                other = other[step]
            holder[key] = copy.deepcopy(other)
        case "renamed" if isinstance(holder, dict):
            name = str(value)[:50] if draw.random() < 0.5 else draw.choice(list(holder))
            holder[name] = holder.pop(key)
        case _:
            holder[key] = value


def changed_text(text: str, draw: random.Random) -> str:
    """No JSON value any more: a name twice, deep nesting, no number, a hole."""
    at = draw.choice([i for i, c in enumerate(text) if c in ",:" and i > 90] or [0])
    deep = draw.choice([50, 90, 900, 100_000])
    new = draw.choice(
        [
            '"step": 1, "step": 2',
            "NaN",
            "Infinity",
            "9" * 5000,
            "[" * deep + "]" * deep,
            '{"a":' * deep,
            "\\ud800",
            "\0",
        ]
    )
    return text[: at + 1] + new + text[at + draw.choice([1, 1, 20]) :]


def header_of(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_header(text: str, rest: bytes, draw: random.Random | None = None) -> bytes:
    """``draw``: the length may be another."""
    encoded = text.encode(errors="surrogatepass")
    length = len(encoded)
    if draw is not None and draw.random() < 0.1:
        length = draw.choice([0, 1 << 62, (1 << 64) - 1, length + 1, 100_000_001, len(rest)])
    return length.to_bytes(8, "little") + encoded + rest


def spoil(folder: Path, draw: random.Random) -> str:
    """Change a good checkpoint; what was changed."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    file = folder / draw.choice(sorted(data["files"]))
    kind = draw.choice(["manifest"] * 5 + ["manifest text", "header", "header", "header text", "bytes"])
    content = file.read_bytes()
    match kind:
        case "manifest":
            for _ in range(draw.choice([1, 1, 2, 4])):
                changed(draw.choice([data, data, data.get("values", data)]), draw)
        case "header" | "header text" | "bytes":
            header, rest = header_of(content)
            if kind == "header":
                for _ in range(draw.choice([1, 1, 3])):
                    changed(header, draw)
            text = json.dumps(header)
            if kind == "header text":
                text = changed_text(text, draw)
            if kind == "bytes":
                rest = draw.choice([b"", rest[1:], rest + b"\0", os.urandom(len(rest)), bytes(50_000_000)])
            content = with_header(text, rest, draw)
            file.write_bytes(content)
            data["files"][file.name] = {"bytes": len(content), HASH: digest(content)}
    text = json.dumps(data)
    if kind == "manifest text":
        text = changed_text(text, draw)
    begin = '{"sha256": "'
    if text.startswith(begin) and '"' in text[len(begin) :]:
        text = signed(text)
    path.write_bytes(text.encode(errors="surrogatepass"))
    return kind


def digest(content: bytes) -> str:
    """As a manifest has it."""
    hasher = Hasher()
    hasher.update(content)
    return hasher.hexdigest()
