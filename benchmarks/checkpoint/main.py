"""Saving and loading a run, and the pause that a save makes in training, against torch.distributed.checkpoint.

    python benchmarks/checkpoint/main.py                             # three sizes, 2 ranks: some minutes on 2 cores
    python benchmarks/checkpoint/main.py --size small --rounds 3     # small | middle | large
    python benchmarks/checkpoint/main.py --ranks 4 --folder /mnt/disk --json results.json

The exit status is 1 if something that was loaded is not what was saved.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from contestants import CONTESTANTS, Keeper, copies, emptied, spoil
from harness.groups import launch
from harness.memory import peak_of
from harness.models import Block, Workload, decoder
from harness.report import machine
from harness.rows import Row, as_json, ratio_row, value_row
from harness.turns import Spread, no_collection, over_ranks, ratios, rotated

MB = 1e6
SIZES: dict[str, dict[str, int]] = {
    "small": {"width": 192, "num_layers": 4},
    "middle": {"width": 384, "num_layers": 5},
    "large": {"width": 768, "num_layers": 5},
}
PEERS = tuple(name for name in CONTESTANTS if name != "plait")
ACTS = ("save", "load", "pause", "written")
WORDS = {"save": "save", "load": "load", "pause": "pause of an asynchronous save", "written": "until that is written"}


@dataclass(frozen=True)
class Arguments:
    """Compare plait's checkpoints with torch's on this machine."""

    size: Literal["all", "small", "middle", "large"] = "all"
    rounds: int = 7
    """Turns that everybody gets; a ratio is formed inside each."""
    ranks: int = 2
    folder: Path | None = None
    """On the disk to be measured; None: the system's folder for temporary files."""
    memory: bool = True
    """Measures the peak memory too, each of its lines in separate ranks."""
    json: Path | None = None


def workload_of(size: str) -> Workload:
    return decoder(Block, steps_per_round=1, length=16, vocabulary=2048, samples=4, **SIZES[size])


def seconds_of(act: Callable[[], Any]) -> float:
    """The slowest rank's."""
    with no_collection():
        dist.barrier()
        start = time.perf_counter()
        act()
        seconds = time.perf_counter() - start
    return over_ranks(seconds, dist.ReduceOp.MAX)


def check_loads(keeper: Keeper, folder: Path) -> None:
    """Raises RuntimeError if a load does not restore the saved values."""
    keeper.step()
    before = [tensor.clone() for tensor in keeper.tensors()]
    keeper.save(emptied(folder))
    spoil(keeper.tensors())
    keeper.load(folder)
    if not all(torch.equal(a, b) for a, b in zip(keeper.tensors(), before, strict=True)):
        raise RuntimeError(f"what {type(keeper).__name__} loads is not what it has saved")


def one_turn(keeper: Keeper, folder: Path) -> dict[str, float]:
    """Seconds of a save, a load, the pause of an asynchronous save, and until that one is written."""
    found = {}
    keeper.step()
    here = emptied(folder)
    found["save"] = seconds_of(lambda: keeper.save(here))
    found["load"] = seconds_of(lambda: keeper.load(here))
    keeper.step()
    there = emptied(folder)
    found["pause"] = seconds_of(lambda: keeper.begin(there))
    found["written"] = found["pause"] + seconds_of(keeper.wait)
    return found


def one_copy(tensors: list[Tensor], into: list[Tensor]) -> dict[str, float]:
    """Seconds of one copy of a rank's state, into memory that was used before, and into new memory."""

    def copy() -> None:
        for source, target in zip(tensors, into, strict=True):
            target.copy_(source)

    return {"copy": seconds_of(copy), "new copy": seconds_of(lambda: list(copies(tensors)))}


def times(size: str, rounds: int, folder: str) -> dict[str, Any]:
    """On every rank; what rank 0 has seen."""
    keepers = {name: build(workload_of(size)) for name, build in CONTESTANTS.items()}
    places = {name: Path(folder, f"{number}") for number, name in enumerate(keepers)}
    for name, keeper in keepers.items():
        check_loads(keeper, places[name])
        one_turn(keeper, places[name])  # the memory of the copies is there from now on
    tensors = keepers["plait"].tensors()
    into = list(copies(tensors))
    rows: dict[str, dict[str, list[float]]] = {name: {act: [] for act in ACTS} for name in keepers}
    rows["one copy"] = {"copy": [], "new copy": []}
    for turn in range(rounds):
        for name in rotated([*keepers, "one copy"], turn):
            found = one_turn(keepers[name], places[name]) if name in keepers else one_copy(tensors, into)
            for act, seconds in found.items():
                rows[name][act].append(seconds)
    size_here = sum(tensor.nbytes for tensor in tensors)
    return {"bytes": int(over_ranks(size_here, dist.ReduceOp.SUM)), "per_rank": size_here, "rows": rows}


def peak(size: str, name: str, act: str, folder: str) -> int:
    """The growth of memory on the rank that needs most."""
    keeper = CONTESTANTS[name](workload_of(size))
    keeper.step()
    here = emptied(Path(folder, "peak"))

    def asynchronous() -> None:
        keeper.begin(here)
        keeper.wait()

    if act == "load":
        keeper.save(here)
    acts = {"save": lambda: keeper.save(here), "load": lambda: keeper.load(here), "asynchronous": asynchronous}
    return int(over_ranks(peak_of(acts[act])["anonymous_peak"], dist.ReduceOp.MAX))


def print_times(answer: dict[str, Any]) -> None:
    rows = answer["rows"]
    print(f"\n{answer['bytes'] / MB:.0f} MB of state, {answer['per_rank'] / MB:.0f} MB on rank 0\n")
    print("| ms | save | load | pause of an asynchronous save | until it is written |\n|---|---|---|---|---|")
    for name in CONTESTANTS:
        spreads = [Spread.of([1e3 * value for value in rows[name][act]]) for act in ACTS]
        print(f"| {name} | " + " | ".join(f"{s.median:.1f} ({s.low:.1f} - {s.high:.1f})" for s in spreads) + " |")
    print("\n| plait against | save | load | pause | until it is written |\n|---|---|---|---|---|")
    for peer in PEERS:
        found = [ratios(rows[peer][act], rows["plait"][act]) for act in ACTS]
        print(f"| {peer} | " + " | ".join(f"{r.median:.2f} ({r.low:.2f} - {r.high:.2f})" for r in found) + " |")
    for what, name in (("copy", "memory that was used before"), ("new copy", "new memory")):
        ms = Spread.of([1e3 * value for value in rows["one copy"][what]]).median
        share = ratios(rows["plait"]["pause"], rows["one copy"][what])
        print(
            f"\none copy into {name}: {ms:.1f} ms; the pause is {share.median:.2f} of it "
            f"({share.low:.2f} - {share.high:.2f})"
        )


def rows_of(answer: dict[str, Any], ranks: int) -> list[Row]:
    """Milliseconds of every contestant, and ours against each of torch's."""
    found: list[Row] = []
    for act, words in WORDS.items():
        work = f"{words}, {answer['bytes'] / MB:.0f} MB, {ranks} ranks"
        ms = {name: [1e3 * value for value in answer["rows"][name][act]] for name in CONTESTANTS}
        found += [value_row("checkpoint", work, name, values, "ms") for name, values in ms.items()]
        found += [ratio_row("checkpoint", work, ("plait", ms["plait"]), (peer, ms[peer]), "ms") for peer in PEERS]
    return found


def peak_rows(peaks: dict[str, dict[str, int]], size: str, ranks: int) -> list[Row]:
    """The growth of memory, in MB; a single measurement of each."""
    found: list[Row] = []
    for act in peaks["plait"]:
        work = f"peak memory of a {act}, {size}, {ranks} ranks".replace("a asy", "an asy")
        mb = {name: [of[act] / MB] for name, of in peaks.items()}
        found += [value_row("checkpoint", work, name, value, "MB") for name, value in mb.items()]
    return found


def main(arguments: Arguments) -> int:
    sizes = list(SIZES) if arguments.size == "all" else [arguments.size]
    results: dict[str, Any] = {"machine": machine(), "ranks": arguments.ranks, "rows": [], "sizes": {}, "peaks": {}}
    print(f"{machine()}, {arguments.ranks} ranks; median (lowest - highest) of {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for size in sizes:
            results["sizes"][size] = launch(times, arguments.ranks, size, arguments.rounds, folder)
            print_times(results["sizes"][size])
            results["rows"] += as_json(rows_of(results["sizes"][size], arguments.ranks))
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        if arguments.memory:
            print(f"\n| MB more than before, {sizes[-1]} | save | asynchronous save | load |\n|---|---|---|---|")
            for name in CONTESTANTS:
                found = {
                    act: launch(peak, arguments.ranks, sizes[-1], name, act, folder)
                    for act in ("save", "asynchronous", "load")
                }
                results["peaks"][name] = found
                print(f"| {name} | " + " | ".join(f"{value / MB:.1f}" for value in found.values()) + " |")
            results["rows"] += as_json(peak_rows(results["peaks"], sizes[-1], arguments.ranks))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
