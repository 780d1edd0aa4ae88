"""Collectives of a ``ProcessComm`` over gloo and over shared memory, and a memcpy by all ranks at once, by size.

    python benchmarks/collectives/main.py                             # 4 KB to 64 MB, 2 and 4 ranks: minutes
    python benchmarks/collectives/main.py --ranks 2 --sizes 4KB 1MB --rounds 9 --json results.json
    python benchmarks/collectives/main.py --kinds all_reduce

The exit status is 1 if a collective's result is not the known one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.contestants import comm_beside
from harness.groups import launch
from harness.report import machine
from harness.rows import Row, as_json, ratio_row, value_row
from harness.turns import no_collection, over_ranks, rotated

from plait.comm.base import Comm
from plait.run.measure.comm import parse_size
from plait.table.mesh import AXES, Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
GLOO, SHARED, LENT, MEMCPY = "gloo", "plait/shm", "plait/shm, lent", "memcpy"
MEBIBYTE = 2**20
GATHERS = 8.0
FOUR_RANKS = 3.0


@dataclass(frozen=True)
class Arguments:
    """Compare plait's collectives over shared memory with gloo's on this machine."""

    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[str, ...] = ("4KB", "64KB", "1MB", "16MB", "64MB")
    """The size of the whole array, in units of 1024."""
    kinds: tuple[str, ...] = KINDS
    rounds: int = 7
    """Turns that everybody gets; a ratio is formed inside each."""
    json: Path | None = None
    """The file for every number, each round's included."""


def goal(kind: str, size: int, ranks: int) -> float | None:
    """Times as fast as gloo."""
    if kind != "all_reduce" and size < MEBIBYTE:
        return None
    if ranks == 4:
        return FOUR_RANKS
    if ranks != 2:
        return None
    if kind != "all_reduce":
        return GATHERS
    return 10.0 if size < MEBIBYTE else 5.0


def calls_of(size: int) -> int:
    """Calls of a turn: the clock is read around all of them."""
    return 50 if size <= 2**16 else 20 if size <= MEBIBYTE else 4


def operation(kind: str, comm: Comm, numel: int, allocate: Callable[[int], Tensor]) -> Callable[[], None]:
    """A collective over all ranks, its result checked once; afterwards it adds zeros, which stay zeros."""
    n, rank = comm.world_size, comm.rank
    pattern = torch.arange(numel, dtype=torch.float32) % 97 + 1
    total = pattern * (n * (n + 1) // 2)
    pieces = pattern.view(n, -1), total.view(n, -1)
    whole, piece = allocate(numel), allocate(numel // n)
    if kind == "all_reduce":
        whole.copy_(pattern * (rank + 1))
        call, result, expected = partial(comm.all_reduce, whole, AXES), whole, total
    elif kind == "reduce_scatter":
        whole.copy_(pattern * (rank + 1))
        call, result, expected = partial(comm.reduce_scatter, piece, whole, AXES), piece, pieces[1][rank]
    else:
        piece.copy_(pieces[0][rank])
        call, result, expected = partial(comm.all_gather, whole, piece, AXES), whole, pattern
    call().wait()
    if not torch.equal(result, expected):
        raise RuntimeError(f"{kind} of {4 * numel} bytes is wrong on rank {rank} of {n}")
    dist.barrier()
    whole.zero_()
    piece.zero_()
    return lambda: call().wait()


def memcpy(numel: int) -> Callable[[], None]:
    """Copies as many bytes as the whole array within this rank's memory."""
    source, target = torch.zeros(numel), torch.zeros(numel)

    def copy() -> None:
        target.copy_(source)

    return copy


def turn(call: Callable[[], None], calls: int) -> float:
    """Microseconds of a call, the slowest rank's."""
    call()
    with no_collection():
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - start) / calls
    return 1e6 * over_ranks(seconds, dist.ReduceOp.MAX)


def task(kinds: tuple[str, ...], sizes: tuple[int, ...], rounds: int) -> dict[str, dict[str, list[float]]]:
    """On every rank: microseconds of everybody in every round, by kind and size."""
    mesh = Mesh(shard=dist.get_world_size())
    over_gloo = comm_beside(mesh, "collectives over gloo")
    shared = comm_beside(mesh, "collectives over shared memory", shared_memory=True)
    found: dict[str, dict[str, list[float]]] = {}
    for kind in kinds:
        for size in sizes:
            numel = -(-size // (4 * mesh.size)) * mesh.size
            calls = {
                GLOO: operation(kind, over_gloo, numel, torch.empty),
                SHARED: operation(kind, shared, numel, torch.empty),
                LENT: operation(kind, shared, numel, lambda count: shared.empty(count, torch.float32)),
                MEMCPY: memcpy(numel),
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for number in range(rounds):
                for name in rotated(list(calls), number):
                    times[name].append(turn(calls[name], calls_of(size)))
            found[f"{kind} {size}"] = times
    return found


def rows_of(found: dict[str, dict[str, list[float]]], ranks: int) -> list[Row]:
    rows: list[Row] = []
    for name, times in found.items():
        kind, _, size = name.partition(" ")
        work = f"{kind} {_human(int(size))}, {ranks} ranks"
        rows += [value_row("collectives", work, who, values, "us") for who, values in times.items()]
        for who in (SHARED, LENT):
            ours = (who, times[who])
            rows.append(ratio_row("collectives", work, ours, (GLOO, times[GLOO]), "us", goal(kind, int(size), ranks)))
            if int(size) >= MEBIBYTE:  # smaller arrays are in a cache
                rows.append(ratio_row("collectives", work, ours, (MEMCPY, times[MEMCPY]), "us"))
    return rows


def _human(size: int) -> str:
    return f"{size // MEBIBYTE} MB" if size >= MEBIBYTE else f"{size // 1024} KB"


def print_rows(rows: list[Row]) -> None:
    print("\n| | microseconds | against | times faster | min - max | goal |\n|---|---|---|---|---|---|")
    for row in rows:
        start = f"| {row.work}: {row.contestant} | {row.value.median:,.0f} |"
        if row.ratio is None:
            print(f"{start} | | | |")
        else:
            verdict = "" if row.goal is None else f"{row.goal:g}: {'met' if row.ratio.median >= row.goal else 'MISSED'}"
            spread = f"{row.ratio.median:.2f} | {row.ratio.low:.2f} - {row.ratio.high:.2f}"
            print(f"{start} {row.peer} | {spread} | {verdict} |", flush=True)


def main(arguments: Arguments) -> int:
    if unknown := set(arguments.kinds) - set(KINDS):
        print(f"no collective is called {', '.join(sorted(unknown))}; there are: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    sizes = tuple(map(parse_size, arguments.sizes))
    print(machine())
    results: dict[str, Any] = {"machine": machine(), "rows": [], "microseconds": {}}
    for ranks in arguments.ranks:
        found = launch(task, ranks, arguments.kinds, sizes, arguments.rounds)
        rows = rows_of(found, ranks)
        print_rows(rows)
        results["microseconds"][f"{ranks} ranks"] = found
        results["rows"] += as_json(rows)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
