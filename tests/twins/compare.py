"""Runs cells in a frozen plait and in this tree, and prints every difference: ``compare.py --set quick --only zero3``.

    PLAIT_TWIN         the python of the frozen environment
    PLAIT_TWIN_CACHE   a folder that keeps the frozen side's results; without it they are kept in the frozen tree

The frozen side runs once for each cell; its results are found again as long as the twins' programs stay as they are.
Exit code 1: there is a difference that ``signed.py`` does not list.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from signed import SIGNED
from torch import Tensor
from twin_cells import SETS, cells, digest_of

HERE = Path(__file__).parent
RUNS = ("run_cells", "twin_models", "twin_rank")
PROGRAMS = {
    "program": ("twin_programs", "twin_programs_wings"),
    "refusal": ("twin_refusals", "twin_refusals_state"),
}
"""The files that say what a cell runs: all cells, and those of a kind.  ``adapter.py`` says how plait is called."""
MOST = 6
"""Differences of a cell that are printed."""
Cell = dict[str, Any]


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((HERE / f"{file}.py").read_text())


@cache
def version(kind: str, program: str) -> str:
    """A digest of what a cell runs: comments and layout do not count, and no other program does."""
    texts = [ast.dump(tree_of(file)) for file in RUNS]
    for node in (node for file in PROGRAMS.get(kind, ()) for node in tree_of(file).body):
        if not isinstance(node, ast.FunctionDef) or not node.decorator_list or node.name == program:
            texts.append(ast.dump(node))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def version_of(cell: Cell) -> str:
    return version(cell["kind"], cell.get("program") or cell.get("refusal") or "")


def chosen(which: str, only: str = "") -> list[Cell]:
    """The cells of a set whose name has a pattern, with the version of what they run."""
    return [cell | {"version": version_of(cell)} for cell in cells(which) if re.search(only, cell["name"])]


def twin() -> str | None:
    """The frozen interpreter, where the environment names one."""
    return os.environ.get("PLAIT_TWIN")


def cache_of(python: str) -> Path:
    """The folder of the frozen side's results."""
    default = Path(python).absolute().parents[2] / ".cache"
    return Path(os.environ.get("PLAIT_TWIN_CACHE") or default) / "twins"


def run(python: str, which: list[Cell], folder: Path) -> None:
    """Runs cells under an interpreter; each leaves a file in the folder."""
    if not which:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(which, file)
        file.flush()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        command = [python, str(HERE / "run_cells.py"), file.name, str(folder)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def frozen(python: str, which: list[Cell]) -> Path:
    """The folder with the frozen side's results, which are made where they are missing."""
    folder = cache_of(python)
    missing = [cell for cell in which if not (folder / f"{digest_of(cell)}.pt").exists()]
    if missing:
        print(f"frozen side: {len(missing)} of {len(which)} cells are not in the cache", file=sys.stderr)
    run(python, missing, folder)
    return folder


def read(folder: Path, cell: Cell) -> dict[str, Any] | None:
    file = folder / f"{digest_of(cell)}.pt"
    return torch.load(file, weights_only=True) if file.exists() else None


def differences(old: dict[str, Any] | None, new: dict[str, Any] | None, *, ledger: bool) -> Iterator[str]:
    """Each difference between two results, in words: rank, what, the old and the new one."""
    if old is None or new is None:
        yield f"no result from the {'frozen' if old is None else 'new'} side: its worker died"
        return
    errors = errors_of(old, new)
    if fault := next((error for error in errors if error and error["own"]), None):
        yield f"fault of the twins themselves: {fault['type']}: {fault['text']}\n{fault['where']}"
        return
    if any(errors):
        yield from between_errors(*errors)
        return
    for rank, (a, b) in enumerate(zip(old["ranks"], new["ranks"], strict=True)):
        found = [*between_values(json.loads(a["values"]), json.loads(b["values"]))]
        found += between_tensors(a["tensors"], b["tensors"])
        if ledger:
            found += between_ledgers(json.loads(a["ledger"]), json.loads(b["ledger"]))
        yield from (f"rank {rank} {one}" for one in found)


def errors_of(*results: dict[str, Any]) -> list[dict[str, Any] | None]:
    return [json.loads(one["error"]) if "error" in one else None for one in results]


def between_errors(old: dict[str, Any] | None, new: dict[str, Any] | None) -> Iterator[str]:
    """Another type, or a name or number that the old message had and the new one has not."""
    if old is None or new is None:
        raised = old or new
        assert raised is not None
        where = f"\n{raised['where']}" if new else ""
        side = "frozen" if new is None else "new"
        yield f"error: only the {side} side raises {raised['type']}: {raised['text']}{where}"
        return
    if old["type"] != new["type"]:
        yield f"error type: {old['type']} -> {new['type']}: {new['text']}\n{new['where']}"
    for kind in ("names", "numbers"):
        if lost := [one for one in old[kind] if one not in new[kind] and one not in new["text"]]:
            yield f"error {kind}: {', '.join(lost)} are gone: {old['text']!r} -> {new['text']!r}"


def between_values(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name, "nothing"), new.get(name, "nothing")
        if isinstance(a, dict) and isinstance(b, dict):
            yield from (f"{name}: {one}" for one in between_values(a, b))
        elif a != b and not (a != a and b != b):
            yield f"{name}: {a} -> {b}"


def between_tensors(old: dict[str, Tensor], new: dict[str, Tensor]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        if name not in new or name not in old:
            yield f"tensor {name}: only the {'frozen' if name in old else 'new'} side has it"
            continue
        a, b = old[name], new[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"tensor {name}: {a.dtype} {[*a.shape]} -> {b.dtype} {[*b.shape]}"
        elif wrong := [i for i, (p, q) in enumerate(zip(bits(a), bits(b), strict=True)) if p != q]:
            at, gap = wrong[0], (a.double() - b.double()).abs().max().item()
            values = f"{a.flatten()[at].item()!r} -> {b.flatten()[at].item()!r}"
            yield f"tensor {name}: {len(wrong)} of {a.numel()} elements, first {at}: {values}, max abs {gap:.2g}"


def bits(tensor: Tensor) -> list[bytes]:
    """Each element's bytes."""
    data, size = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), tensor.element_size()
    return [data[i : i + size] for i in range(0, len(data), size)]


def between_ledgers(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Missing and additional lines of each section; where there are none, the first line out of order."""
    for section in dict.fromkeys([*old, *new]):
        a, b = ([tuple(line) for line in one.get(section, [])] for one in (old, new))
        gone, come = Counter(a) - Counter(b), Counter(b) - Counter(a)
        for sign, lines in (("-", gone), ("+", come)):
            yield from (f"ledger {section} {sign}{n} {' '.join(map(str, line))}" for line, n in lines.items())
        if not gone and not come and a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            yield f"ledger {section} order, line {at}: {' '.join(map(str, a[at]))} -> {' '.join(map(str, b[at]))}"


def reason_for(cell: Cell, difference: str) -> str | None:
    """The reason that ``signed.py`` gives for a difference."""
    signed = (reason for of, what, reason in SIGNED if re.search(of, cell["name"]) and re.search(what, difference))
    return next(signed, None)


def report(which: Iterable[Cell], old: Path, new: Path, *, ledger: bool = True, most: int = MOST) -> tuple[int, int]:
    """Prints the differences; the number of cells that differ unsigned, and of differences that are signed."""
    differ, signed, raising = 0, Counter[str](), list[str]()
    for cell in which:
        found = []
        results = read(old, cell), read(new, cell)
        raising += [cell["name"]] * (cell["kind"] != "refusal" and None not in results and all(errors_of(*results)))
        for one in differences(*results, ledger=ledger):
            if reason := reason_for(cell, one):
                signed[reason] += 1
            else:
                found.append(one)
        differ += bool(found)
        for one in found[:most]:
            lines = one.splitlines()  # of an error, the last calls
            print(f"{cell['name']} | {lines[0]}", *(lines[1:] if most > MOST else lines[1:][-5:]), sep="\n")
        if len(found) > most:
            print(f"{cell['name']} | and {len(found) - most} more (--all)")
    if raising:
        print(
            f"{len(raising)} cells raise one error on both sides, so nothing else is compared: {', '.join(raising[:3])}"
        )
    for reason, times in signed.items():
        print(f"signed {times} times: {reason}")
    return differ, signed.total()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--set", choices=SETS, default="quick")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name has this")
    parser.add_argument("--no-ledger", action="store_true", help="compare values and bits, not messages")
    parser.add_argument("--all", action="store_true", help="print every difference of a cell")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    parser.add_argument("--frozen", action="store_true", help="only fill the cache of the frozen side")
    given = parser.parse_args()
    which = chosen(given.set, given.only)
    if given.list:
        print(*(cell["name"] for cell in which), sep="\n")
        return 0
    python, started = twin(), time.monotonic()
    if python is None or not which:
        print("no cell has such a name" if python else "PLAIT_TWIN names no python of a frozen plait")
        return 2
    old = frozen(python, which)
    if given.frozen:
        return 0
    with tempfile.TemporaryDirectory(prefix="twins") as folder:
        run(sys.executable, which, Path(folder))
        differ, signed = report(which, old, Path(folder), ledger=not given.no_ledger, most=10**9 if given.all else MOST)
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{len(which)} cells, {differ} differ, {signed} differences are signed, {took}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
