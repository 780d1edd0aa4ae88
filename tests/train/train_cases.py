"""Cases of ``plait train``: a text, sizes of a tiny decoder, numbers that its steps have made."""

import json
from pathlib import Path
from typing import Any

import pytest

SIZES = ["--layers", "2", "--width", "16", "--heads", "2", "--kv-heads", "1", "--length", "12"]
MADE = ("step", "loss", "lr", "tokens", "grad_norm")


def write_text(factory: pytest.TempPathFactory, lines: int) -> str:
    path: Path = factory.mktemp("text") / "text"
    path.write_text("".join(f"{n} squared is {n * n}, and ten times {n} is {10 * n}.\n" for n in range(lines)))
    return str(path)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def made(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in MADE} for line in metrics(out)]
