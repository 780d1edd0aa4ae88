"""The cells of the twins, as plain data: settings of one run each, and a name for it.

    quick    every two settings together, and each whole program once or twice
    full     quick, every row on every mesh, every row in every order of a pipeline, and more settings by chance

The same cells come out each time, on any machine and under any plait.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from typing import Any

from twin_programs_wings import PROGRAMS
from twin_refusals_state import REFUSALS

Cell = dict[str, Any]

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3_keep", "hsdp", "psdp", "hpz")
MINE = "mine: shard | full | shard, pending(replica) | shard/replica"
DATA = ("shard=1", "shard=2", "shard=3", "shard=4", "replica=2", "replica=3", "replica=2 shard=2")
HOSTS = ("replica=2 shard=2 hosts=2",)
PIPES = ("pipe=2", "pipe=3", "pipe=2 shard=2", "pipe=2 replica=2", "pipe=2 replica=2 shard=2")
TENSORS = ("tensor=2", "tensor=3", "shard=2 tensor=2", "replica=2 tensor=2")
ALL = ("pipe=2 tensor=2", "pipe=2 shard=2 tensor=2")
MESHES = (*DATA, *HOSTS, *PIPES, *TENSORS, *ALL)
ORDERS = ("naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipe_v")

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "row": (*ROWS, MINE),
    "mesh": MESHES,
    "model": ("mlp", "gpt", "reader"),
    "schedule": (None, *ORDERS),
    "microbatches": (1, 3),
    "dropout": (0.0, 0.2),
    "tied": (False, True),
    "dtype": ("fp32", "fp64", "bf16-mixed", "fp16-mixed"),
    "optimizer": ("adamw", "sgd", "groups"),
    "recompute": (None, "full", "selective"),
    "clip": (None, 0.3),
    "cut": ("element", "tensor"),
    "bucket": (1 << 22, 0),
    "prefetch": (1, 0, 2),
    "hold": (1, None, 0),
    "loop": ("step", "own"),
    "frozen": (False, True),
    "offload": (False, True),
    "sequence_parallel": (False, True),
}
APART = {"row", "mesh", "schedule"}
"""Settings of many values, every two of which meet in the full set only."""
FIRST_OF_A_KIND = ("shard=2", "replica=2 shard=2", "pipe=2 shard=2", "shard=2 tensor=2")
PLAIN = {name: values[0] for name, values in DIMENSIONS.items()}


def stages(mesh: str, schedule: str | None) -> int:
    pipe = int(mesh.split("pipe=")[1][0]) if "pipe" in mesh else 1
    return pipe * (2 if schedule in ("interleaved", "zbv", "dualpipe_v") else 1)


RULES: tuple[tuple[tuple[str, ...], Callable[..., bool]], ...] = (
    (("mesh", "schedule"), lambda mesh, schedule: ("pipe" in mesh) == (schedule is not None)),
    (("mesh", "schedule"), lambda mesh, schedule: stages(mesh, schedule) <= 6),
    (("mesh", "model"), lambda mesh, model: "tensor" not in mesh or model == "gpt"),
    (("mesh", "model"), lambda mesh, model: "pipe" not in mesh or model != "reader"),
    (("mesh", "dtype"), lambda mesh, dtype: "tensor" not in mesh or dtype in ("fp32", "fp64")),
    (("mesh", "sequence_parallel"), lambda mesh, sequence: "tensor" in mesh or not sequence),
    (("mesh", "loop"), lambda mesh, loop: "pipe" not in mesh or loop == "step"),
    (("mesh", "hold"), lambda mesh, hold: "pipe" in mesh or hold == 1),
    (("model", "tied"), lambda model, tied: model == "gpt" or not tied),
    (("model", "recompute"), lambda model, recompute: model == "gpt" or recompute != "selective"),
    (("model", "recompute"), lambda model, recompute: model != "reader" or not recompute),
    (("row", "bucket"), lambda row, bucket: row in ROWS[:3] or bucket != 0),
    (("row", "prefetch"), lambda row, prefetch: row not in ROWS[:3] or prefetch == 1),
    (("row", "hold"), lambda row, hold: row not in ROWS[:3] or hold == 1),
    (("dtype", "loop"), lambda dtype, loop: dtype != "fp16-mixed" or loop == "step"),
)
"""They leave out settings that plait refuses, or that change nothing."""


def fits(point: Cell, name: str) -> bool:
    """No rule over this setting and others that are there is broken."""
    return all(holds(*map(point.get, over)) for over, holds in RULES if name in over and point.keys() >= {*over})


def drawn(chance: random.Random, **fixed: Any) -> Cell | None:
    """A point with these values, the others by chance; None where the rules leave no such point."""
    if not all(fits(fixed, name) for name in fixed):
        return None
    for _ in range(20):
        point = dict(fixed)
        for name, values in DIMENSIONS.items():
            if name not in fixed:
                left = [value for value in values if fits({**point, name: value}, name)]
                if not left:
                    break
                point[name] = chance.choice(left)
        else:
            return {name: point[name] for name in DIMENSIONS}
    return None


def kind_of(mesh: str) -> str:
    """Meshes of a kind have the same axes."""
    return " ".join(word.split("=")[0] for word in mesh.split())


def pairs_of(point: Cell) -> set[tuple[Any, ...]]:
    """The pairs of settings in a point; a row meets each kind of mesh, and not each mesh in each order."""
    pairs = {pair for pair in combinations(point.items(), 2) if not {pair[0][0], pair[1][0]} <= APART}
    return pairs | {("kind", point["row"], kind_of(point["mesh"]))}


def covering(seed: int, tries: int = 40) -> list[Cell]:
    """Points in which every two values meet that go together."""
    chance, points, covered = random.Random(seed), list[Cell](), set[tuple[Any, ...]]()
    wanted = [{"row": row, "mesh": mesh} for row, mesh in product(DIMENSIONS["row"], FIRST_OF_A_KIND)]
    for one, other in combinations(DIMENSIONS, 2):
        if not {one, other} <= APART:
            wanted += [{one: u, other: v} for u, v in product(DIMENSIONS[one], DIMENSIONS[other])]
    for pair in wanted:
        if ("kind", pair.get("row"), kind_of(pair.get("mesh", ""))) in covered or tuple(pair.items()) in covered:
            continue
        found = [point for _ in range(tries) if (point := drawn(chance, **pair))]
        if found:
            best = max(found, key=lambda point: len(pairs_of(point) - covered))
            points.append(best)
            covered |= pairs_of(best)
    return points


def name_of(point: Cell) -> str:
    """The settings that are not the plain ones, in words."""
    words = [point["row"].split(":")[0], point["mesh"].replace(" ", ","), point["model"]]
    for name in DIMENSIONS:
        value = point[name]
        if name in ("row", "mesh", "model") or value == PLAIN[name]:
            continue
        short = {"microbatches": f"m{value}", "bucket": "no-buckets", "schedule": value, "dtype": value}
        short |= {"optimizer": value, "loop": "own-loop", "dropout": "dropout"}
        words.append(str(name if value is True else short.get(name, f"{name}={value}")))
    return " ".join(words)


def trained(points: Iterable[Cell]) -> list[Cell]:
    """Cells that train a model under a point's settings, each once."""
    return list(
        {name: {"kind": "train", "name": name, **point} for point in points if (name := name_of(point))}.values()
    )


def plain() -> list[Cell]:
    """Every row under the plainest settings, for a look at one thing alone."""
    return [PLAIN | {"row": row, "mesh": "replica=2 shard=2", "microbatches": 3} for row in DIMENSIONS["row"]]


def rows_on_meshes(chance: random.Random) -> Iterator[Cell]:
    """Every row on every mesh, with one and three microbatches, with and without dropout."""
    for row, mesh, microbatches, dropout in product((*ROWS, MINE), MESHES, (1, 3), (0.0, 0.2)):
        if point := drawn(chance, row=row, mesh=mesh, microbatches=microbatches, dropout=dropout):
            yield point


def rows_in_orders(chance: random.Random) -> Iterator[Cell]:
    """Every row in every order of a pipeline, on two meshes, tied and not."""
    for row, mesh, schedule, tied in product(ROWS, PIPES[1:3], ORDERS, (False, True)):
        if point := drawn(chance, row=row, mesh=mesh, schedule=schedule, tied=tied, model="gpt", microbatches=3):
            yield point


def digest_of(cell: Cell) -> str:
    """The name of a cell's file."""
    return hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:20]


def processes() -> list[Cell]:
    """A dozen runs of processes over shared memory."""
    chance = random.Random(3)
    meshes = ("shard=2", "shard=3", "replica=2 shard=2", "pipe=2", "tensor=2", "pipe=2 shard=2")
    rows = ("ddp", "zero1", "zero2", "zero3", "zero3_keep", "hsdp", "psdp", "hpz", "zero3", "zero1", "zero3", "ddp")
    points = [drawn(chance, row=row, mesh=meshes[number % len(meshes)]) for number, row in enumerate(rows)]
    return [cell | {"kind": "processes", "name": f"processes {cell['name']}"} for cell in trained(filter(None, points))]


def programs(most: int | None = None) -> list[Cell]:
    """Whole programs, each on some layouts."""
    cells = []
    for number, (name, (_, layouts)) in enumerate(PROGRAMS.items()):
        start = number % len(layouts)
        for row, mesh in (layouts[start:] + layouts[:start])[:most]:
            title = f"program {name} {row} {mesh.replace(' ', ',')}".replace("  ", " ")
            cells.append({"kind": "program", "name": title, "program": name, "row": row, "mesh": mesh})
    return cells


def refusals() -> list[Cell]:
    return [{"kind": "refusal", "name": f"refusal {name}", "refusal": name} for name in REFUSALS]


SETS = ("quick", "full", "train", "programs", "refusals", "processes")


def cells(which: str) -> list[Cell]:
    """The cells of a set: quick, full, or one kind alone."""
    if which == "quick":
        return trained(plain() + covering(1)) + programs(1) + refusals() + processes()[:4]
    if which == "full":
        chance = random.Random(2)
        points = [*plain(), *covering(1), *rows_on_meshes(chance), *rows_in_orders(chance)]
        return trained(points) + programs() + refusals() + processes()
    if which == "train":
        return trained(covering(1))
    return {"programs": programs, "refusals": refusals, "processes": processes}[which]()
