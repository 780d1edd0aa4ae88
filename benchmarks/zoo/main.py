"""Trains other people's models in turn: does each layout equal the run of plain PyTorch on one process?

    python benchmarks/zoo/main.py --json zoo.json --page docs/compatibility.md --fsdp2     # all of it
    python benchmarks/zoo/main.py --only causal/llama bert                # these; without a slash: of every kind
    python benchmarks/zoo/main.py --part 1/4 --layouts ddp zero3          # a quarter of them, two layouts
    python benchmarks/zoo/main.py --json zoo.json --keep                  # models that the file does not have yet

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
from page import page
from trial import LAYOUTS, PEER
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
    """The rows' file; earlier rows that are not made again stay in it."""
    keep: bool = False
    """Leave out the models that the file already has."""
    jobs: int = 2
    """Models at a time."""
    deadline: float = 300.0
    """Seconds for one model."""
    page: Path | None = None
    """The table's file: docs/compatibility.md."""
    fsdp2: bool = False
    """Adds torch's FSDP2, on two processes."""
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
    layouts = (*arguments.layouts, *([PEER] if arguments.fsdp2 else []))
    number, parts = map(int, arguments.part.split("/"))
    every = [e for e in entries(arguments.kinds) if not arguments.only or {str(e), e.name} & set(arguments.only)]
    chosen = [e for e in every[number - 1 :: parts] if not (arguments.keep and str(e) in rows)]
    with tempfile.TemporaryDirectory() as folder:
        found = examined(chosen, layouts, Path(folder), jobs=arguments.jobs, deadline=arguments.deadline)
        for done, (entry, row) in enumerate(found, start=1):
            earlier = {} if "not built" in {**row, **rows.get(str(entry), {})} else rows.get(str(entry), {})
            rows[str(entry)] = earlier | row
            print(f"{done}/{len(chosen)} {line_of(entry, row, layouts)}", flush=True)
            if arguments.traceback:
                print("\n".join(row[name]["traceback"] for name in layouts if name in row))
            if arguments.json:
                arguments.json.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    if arguments.page:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
        arguments.page.write_text(page(list(rows.values()), versions))
    words = {name: Counter(row[name]["word"] for row in rows.values() if name in row) for name in (*LAYOUTS, PEER)}
    for name, counted in words.items():
        if counted:
            print(f"{name}: {', '.join(f'{number} {word}' for word, number in counted.most_common())}")
    return int(any(words[name]["wrong"] or words[name]["crash"] for name in LAYOUTS))


def line_of(entry: object, row: Row, layouts: tuple[str, ...]) -> str:
    """A row as it comes."""
    if "not built" in row:
        return f"{entry}: not built: {row['not built']}"
    said = []
    for name in layouts:
        result = row[name]
        why = f" ({result['why']})" if result["why"] else ""
        ledger = " LEDGER" if result["ledger"] else ""
        said.append(f"{name} {result['word']}{why}{ledger} {result['seconds']:.0f}s")
    return f"{entry}: {'; '.join(said)}"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
