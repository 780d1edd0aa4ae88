"""Other people's models, one after the other: is each layout the run of plain PyTorch on one process?

    python benchmarks/zoo/main.py                                     # all, into docs/compatibility.md
    python benchmarks/zoo/main.py --only causal/llama masked/bert     # these; without a slash: of every kind
    python benchmarks/zoo/main.py --part 1/4 --layouts ddp zero3      # a part of them, some layouts
    python benchmarks/zoo/main.py --keep results.json                 # those that are not in it yet

Every architecture of transformers is built from its own default config, made small by one function (``shrink``), with
random weights in fp64, and trained for three steps on ragged batches. Exit code 1 if any row is wrong or a crash.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import tyro
from catalogue import KINDS, entries
from trial import LAYOUTS
from worker import Row, examined, preload


@dataclass(frozen=True)
class Arguments:
    """Train other people's models under plait's layouts and compare them with one process."""

    only: tuple[str, ...] = ()
    """Names of architectures (llama), or of one kind (masked/bert); empty: all."""
    kinds: tuple[str, ...] = tuple(KINDS)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    part: str = "1/1"
    """i/n: every n-th model from the i-th on."""
    json: Path | None = None
    """Where the rows go; those of earlier runs that are not made again stay in it."""
    keep: bool = False
    """Leave out the models that the file already has."""
    jobs: int = 2
    """Models at a time."""
    deadline: float = 120.0
    """Seconds for one model."""
    page: Path | None = None
    """Where the table goes."""
    traceback: bool = False
    """Print those of crashes and refusals."""


def main(arguments: Arguments) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    preload()
    rows: dict[str, Row] = {}
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
    number, parts = map(int, arguments.part.split("/"))
    every = [e for e in entries(arguments.kinds) if not arguments.only or {str(e), e.name} & set(arguments.only)]
    chosen = [e for e in every[number - 1 :: parts] if not (arguments.keep and str(e) in rows)]
    with tempfile.TemporaryDirectory() as folder:
        found = examined(chosen, arguments.layouts, Path(folder), jobs=arguments.jobs, deadline=arguments.deadline)
        for done, (entry, row) in enumerate(found, start=1):
            rows[str(entry)] = rows.get(str(entry), {}) | row if "not built" not in row else row
            print(f"{done}/{len(chosen)} {line_of(entry, row, arguments.layouts)}", flush=True)
            if arguments.traceback:
                print("\n".join(row[name]["traceback"] for name in arguments.layouts if name in row))
            if arguments.json:
                arguments.json.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    words = {name: Counter(row[name]["word"] for row in rows.values() if name in row) for name in LAYOUTS}
    for name, counted in words.items():
        print(f"{name}: {', '.join(f'{number} {word}' for word, number in counted.most_common())}")
    return int(any(counted["wrong"] or counted["crash"] for counted in words.values()))


def line_of(entry: object, row: Row, layouts: tuple[str, ...]) -> str:
    """A row as it comes."""
    if "not built" in row:
        return f"{entry}: not built: {row['not built']}"
    said = []
    for name in layouts:
        result = row[name]
        why = f" ({result['why']})" if result["why"] else ""
        said.append(f"{name} {result['word']}{why}{' LEDGER' if result['ledger'] and result['once'] else ''} {result['seconds']:.0f}s")
    return f"{entry}: {'; '.join(said)}"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
