"""The cells of ``plait verify --matrix``: the layouts to compare with the single process, and their settings.

    small    every two values of all dimensions meet in a cell, on at most 8 ranks
    full     the same on at most 16 ranks, and every row of the table on every mesh of at most 8 ranks

A *point* gives each dimension a value; ``config_of`` turns it into a config of ``plait verify``.  The sizes are as
awkward as the meshes allow: 67 samples, which no mesh divides; 9 links, which few numbers of stages divide; 7 tokens,
some of them without a loss; vectors of 5 elements (mlp).  Only the decoder's 12 heads divide by 1, 2, 3 and 4, because
a head cannot be split.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, product
from typing import Any, Literal

from plait.pipeline.blocks import cut
from plait.referee.verify.covering import Rule, covering
from plait.run.config.settings import VerifyConfig, with_job
from plait.run.job.job import build_model
from plait.run.job.optimizer import OPTIMIZERS
from plait.run.job.sections import flags
from plait.schedule.orders import ORDERS, stages_per_rank
from plait.table.cells import TABLE
from plait.table.flat import BUCKET_BYTES
from plait.table.mesh import AXES, Mesh

Size = Literal["small", "full"]

LINKS = 9  # in either model
OF_A_JOB = ("strategy", "replica", "shard", "hosts", "microbatches", "cut", "bucket", "offload")
SIZES = VerifyConfig(steps=2, batch=67, length=7, clip=0.3)
MODELS = {
    "gpt": SIZES.with_flags(model="gpt", layers=LINKS - 3, width=24, heads=12, kv_heads=12),
    "mlp": SIZES.with_flags(model="mlp", layers=LINKS, width=5),
}
COUNTS = (1, 2, 3, 4)
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "strategy": tuple(TABLE),
    **dict.fromkeys(AXES, COUNTS),
    "hosts": ("one", "each replica"),
    "schedule": (None, *ORDERS),
    "microbatches": COUNTS,
    "cut": ("element", "tensor"),
    "bucket": (0, BUCKET_BYTES),
    "sequence_parallel": (False, True),
    "optimizer": tuple(OPTIMIZERS),
    "chunks": (None, 3),
    "hold": (1, 0, 2, None),
    "split": ("even", "uneven"),
    "dtype": ("full", "bf16-mixed", "fp16-mixed"),
    "recompute": (None, "full"),
    "offload": (False, True),
}
"""The config fields that the matrix varies.  An uneven ``split`` depends on the number of stages, ``hosts`` is one in
all or one for each replica of a stage, and ``dtype`` full is fp64 with a tensor axis, fp32 without."""


def stages(pipe: int, schedule: str | None, chunks: int | None) -> int:
    """The number of stages on the ranks of the pipe axis."""
    return pipe * (1 if schedule is None else chunks or stages_per_rank(schedule))


RULES = (
    Rule(("pipe", "schedule"), lambda pipe, schedule: pipe == 1 or schedule is not None),
    Rule(("schedule", "chunks"), lambda schedule, chunks: not chunks or (schedule and ORDERS[schedule].takes_chunks)),
    Rule(("pipe", "schedule", "chunks"), lambda *point: stages(*point) <= LINKS),
    Rule(("replica", "shard", "hosts"), lambda replica, shard, hosts: hosts == "one" or min(replica, shard) > 1),
    Rule(("tensor", "sequence_parallel"), lambda tensor, sequence: tensor > 1 or not sequence),
    Rule(("model", "sequence_parallel"), lambda model, sequence: model == "gpt" or not sequence),
    Rule(("schedule", "hold"), lambda schedule, hold: schedule is not None or hold == 1),
    Rule(("strategy", "bucket"), lambda row, bucket: bool(bucket) or not TABLE[row].params.split),
    Rule(("strategy", "hold"), lambda row, hold: hold == 1 or bool(TABLE[row].params.split)),
    Rule(("pipe", "schedule", "split"), lambda pipe, order, split: split == "even" or stages(pipe, order, None) > 1),
    Rule(("tensor", "dtype"), lambda tensor, dtype: tensor == 1 or dtype == "full"),
)
"""They exclude the layouts that plait refuses, settings that change nothing, and products of few bits split by a tensor
axis: a verdict on those says little, since they are equal only within the rounding of those bits."""


def cells(size: Size) -> tuple[VerifyConfig, ...]:
    """The configs of a matrix, without duplicates."""
    found = points(8 if size == "small" else 16)
    if size == "full":
        orders, meshes = cycle(ORDERS), [Mesh(*counts) for counts in product(COUNTS, repeat=len(AXES))]
        for mesh, row in product([mesh for mesh in meshes if mesh.size <= 8], TABLE):
            order = next(orders) if mesh.pipe > 1 else None
            point = {"model": "gpt", "strategy": row, "schedule": order, "microbatches": 2}
            found.append(point | {axis: mesh.axis(axis) for axis in AXES})
    return tuple(dict.fromkeys(map(config_of, found)))


def points(most: int) -> list[dict[str, Any]]:
    """Points on at most ``most`` ranks in which every two compatible values meet."""
    fits = Rule(AXES, lambda *counts: math.prod(counts) <= most)
    return covering(DIMENSIONS, (*RULES, fits))


def cells_of_job(config: VerifyConfig, size: Size) -> tuple[VerifyConfig, ...]:
    """The cells of a user's job: they vary settings that fit any model, and pipelines if it names its links."""
    samples, most = with_job(config).task.samples.batch, 8 if size == "small" else 16
    try:
        links = len(cut(build_model(config.task, config.dtypes)).blocks)
    except ValueError:
        links = 1
    dimensions = {name: values for name, values in DIMENSIONS.items() if name in OF_A_JOB}
    dimensions["dtype"] = ("full", "bf16-mixed")
    if links > 1:
        dimensions |= {name: DIMENSIONS[name] for name in ("pipe", "schedule", "hold")}
    rules = (
        *RULES,
        Rule(("replica", "shard", "microbatches"), lambda *parts: math.prod(parts) <= samples),
        Rule(tuple(axis for axis in AXES if axis in dimensions), lambda *counts: math.prod(counts) <= most),
        Rule(("pipe", "schedule"), lambda pipe, schedule: stages(pipe, schedule, None) <= links),
    )
    known = [rule for rule in rules if dimensions.keys() >= {*rule.over}]
    return tuple(config_of(point, config) for point in covering(dimensions, known))


def config_of(point: Mapping[str, Any], base: VerifyConfig | None = None) -> VerifyConfig:
    """The config of a point; a missing dimension is as in ``base``, or as the point's model has it."""
    given = dict(point)
    mesh = Mesh(**{axis: given.pop(axis, 1) for axis in AXES})
    if given.pop("hosts", "one") != "one":
        mesh = replace(mesh, hosts=mesh.pipe * mesh.replica)
    count = stages(mesh.pipe, given.get("schedule"), given.get("chunks"))
    split = uneven(count) if given.pop("split", "even") == "uneven" else None
    if given.get("dtype", "full") == "full":
        given["dtype"] = "fp64" if mesh.tensor > 1 else "fp32"
    changes: dict[str, Any] = {"mesh": str(mesh), "split": split}
    return (base or MODELS[given.pop("model")]).with_flags(**changes, **given)


def uneven(num_stages: int) -> str:
    """A split of the links in which a stage in the middle has all links but one for each of the others."""
    sizes = [1] * num_stages
    sizes[num_stages // 2] += LINKS - num_stages
    return " ".join(map(str, sizes))


def due(config: VerifyConfig) -> str:
    """The verdict that a cell must get: bitwise, unless a tensor axis splits products."""
    return "equal" if config.machine.parsed_mesh.tensor > 1 else "bitwise"


def command(config: VerifyConfig) -> str:
    """The ``plait verify ...`` command that runs only this config."""
    words = ["plait", "verify"]
    unsaid = flags(VerifyConfig())
    for name, value in flags(config).items():
        if value != unsaid[name]:
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
    return shlex.join(words)
