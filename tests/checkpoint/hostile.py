"""Checkpoints that somebody has made to do harm: ``python hostile.py <seconds> <first seed>``.

A manifest, a header or a file of a good checkpoint is changed at random, and signed anew so that every hash is right.
``plait.load`` then loads it, or raises ValueError with nothing changed.  It opens nothing outside the run's folder; it
has 512 MiB of memory, where the checkpoint has 20 kB, and seconds.  It prints a line of JSON at the end.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from run_cases import differences

import plait
from plait.checkpoint.hashing import HASH, digest_of
from plait.checkpoint.manifest import signed
from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh

MEMORY = 512 << 20
SECONDS = 20.0
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 7, -1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, 1.5, -0.0, 1e308, "", "0", "nan"),
    *(
        "../rank-00000.safetensors",
        "/etc/passwd",
        "rank-00001.safetensors",
        "manifest.json",
        ".",
        "..",
        "a\0b",
        "\ud800",
    ),
    *(
        "model/0.weight",
        "value/0",
        "float32",
        "F64",
        "int8",
        "bool",
        "x" * 10_000,
        "\x1b[31m",
        "rank-00000.9f.safetensors",
    ),
    *([], {}, [[]], [0, 0], [[0, 1 << 62]], [1 << 40, 1 << 40], [0] * 70, [1] * 5000, [2] * 64, [10**300] * 2000),
    *({"tensor": "model/0.weight"}, {"tensor": "value/0"}, {"float": "inf"}, {"tuple": [{"tensor": "value/0"}] * 50}),
    *(
        {"number": 10**30, "dtype": "int8"},
        {"number": {"float": "nan"}, "dtype": "int64"},
        {"dict": [[{"dict": []}, 1]]},
    ),
    *(
        [1],
        10**4298,
        {"number": 1.0, "dtype": "complex64"},
        {"number": 1.0, "dtype": "float64"},
        {"dict": [["step", 1]]},
    ),
    *({"number": -1, "dtype": "uint8"}, {"counter": [["a", "b"]]}, {"number": 1e300, "dtype": "float16"}),
]


def build(comm: Comm) -> tuple[Engine, plait.EMA]:
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, number / 9, parameter.numel()).view(parameter.shape))
    engine = Engine(model, comm, strategy="zero3", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    return engine, plait.EMA(engine, 0.9)


def write(path: Path) -> None:
    """A good one, of two ranks."""

    def body(comm: Comm) -> None:
        engine, ema = build(comm)
        engine.backward(engine.model(torch.ones(2, 3)).square().sum(), 2)
        assert engine.optimizer is not None
        engine.optimizer.step()
        plait.save(path, engine, ema=ema, extra={"numbers": torch.arange(4), "at": (1, None, 0.5, {"a": [1]})})

    run(Mesh(shard=2), body, deadline=60)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of a JSON value are."""
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
    """What no JSON value is: a name twice, deep nesting, no number, a hole."""
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
    kind = draw.choice(["manifest"] * 5 + ["manifest text", "header", "header", "header text", "bytes", "no file"])
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
        case "no file":
            victim = draw.choice([file, path, folder])
            outside = folder.parent.parent / "outside"
            victim.rename(outside)
            match draw.choice(["link", "pipe", "folder", "gone", "loop"]):
                case "link" if victim is not folder:  # a folder of checkpoints may have links to them
                    victim.symlink_to(outside)
                case "pipe":
                    os.mkfifo(victim)
                case "folder":
                    victim.mkdir()
                case "loop":
                    victim.symlink_to(victim)
            return kind
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

    def read(start: int, into: memoryview) -> None:
        into[:] = content[start : start + len(into)]

    return digest_of(len(content), 1 << 20, read)


OPENED: list[str] = []
WATCHED = [False]


def watch() -> None:
    """Note whatever this process opens from now on."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if WATCHED[0] and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            followed = event != "open" or not arguments[2] & os.O_NOFOLLOW
            OPENED.append(os.path.realpath(path if followed else os.path.dirname(path)))

    sys.addaudithook(hook)


@contextmanager
def watched(run_folder: Path) -> Iterator[None]:
    """Nothing outside of a folder may be opened; Python's own modules aside."""
    OPENED.clear()
    WATCHED[0] = True
    try:
        yield
    finally:
        WATCHED[0] = False
    allowed = (str(run_folder), sys.prefix, sys.base_prefix, str(Path(plait.__file__).parents[1]))
    strange = [path for path in OPENED if not path.startswith(allowed)]
    assert not strange, f"opened {strange[:3]}"


def attempt(path: Path) -> str:
    """ "loaded", or what was refused; anything else is raised."""

    def body(comm: Comm) -> str:
        engine, ema = build(comm)

        def state() -> Any:
            whole = engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()
            return *whole, ema.full_state_dict(), ema.decay

        before = copy.deepcopy(state())
        try:
            plait.load(path, engine, ema=ema)
        except ValueError as error:
            assert len(str(error)) < 2000 and str(error).isprintable(), f"unclear: {str(error)[:3000]!r}"
            assert not (changes := differences(state(), before)), f"changed: {changes[:3]}, by {error}"
            return "refused"
        return "loaded"

    found: str = run(Mesh(shard=1), body, deadline=60)[0]
    return found


def play(good: Path, work: Path, seed: int) -> tuple[str, str]:
    """What was changed, and what became of it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work / "run")
    kind = spoil(work / "run" / "step-000001", random.Random(seed))
    start = time.process_time()  # other work on the machine is not its own
    with watched(work / "run"):
        found = attempt(work / "run")
    assert (seconds := time.process_time() - start) < SECONDS, f"{seconds:.1f} s"
    return kind, found


def main(seconds: float, first: int) -> int:
    work = Path(tempfile.mkdtemp()).resolve()
    counts: Counter[tuple[str, str]] = Counter()
    wrong, slowest, begin, seed = [], 0.0, time.monotonic(), first
    watch()
    write(work / "good")
    play(work / "good", work / "case", first)  # what is imported late is imported now
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    while seed == first or time.monotonic() < begin + seconds:
        start = time.monotonic()
        try:
            counts[play(work / "good", work / "case", seed)] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong.append(f"{seed}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc()
        slowest = max(slowest, time.monotonic() - start)
        seed += 1
    shutil.rmtree(work)
    counted = {" ".join(key): count for key, count in sorted(counts.items())}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        json.dumps({"cases": seed - first, "slowest": slowest, "MiB": peak, **counted, "wrong": wrong[:20]}, indent=1)
    )
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]), int(sys.argv[2]))))
