"""Tables of a plan's neighbours, made beforehand: the page's sliders choose a line and compute nothing.

devices   mesh             row    microbatches  recompute   bytes by kind   seconds by part
8         shard=8          zero3  4             full        ...             ...
8         shard=4 tensor=2 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from plait.predict.duration import Duration
from plait.predict.footprint import Footprint
from plait.predict.plan import Plan
from plait.predict.search import Candidate, Question, candidates, room
from plait.table.cells import Strategy

MOST_LINES = 4000
FIELDS = ("devices", "pipe", "tensor", "context", "expert", "replica", "row", "microbatches", "recompute")
"""The settings of a line, each with a slider."""
KINDS = tuple(field.name for field in fields(Footprint) if field.name != "pipe")
PARTS = tuple(field.name for field in fields(Duration))


def explorer(plan: Plan, rows: Sequence[Strategy]) -> dict[str, Any]:
    """The tables around a plan: on the same number of hosts, half and a quarter of it, twice and four times it.  Bytes
    are in MB, seconds have four digits."""
    own = _line(Candidate.of(plan))
    lines = [*islice(_lines(plan, rows), MOST_LINES), own]
    at = next(i for i, line in enumerate(lines) if line[: len(FIELDS)] == own[: len(FIELDS)])
    return {
        "fields": FIELDS,
        "kinds": KINDS,
        "parts": PARTS,
        "lines": lines if lines[at] is own else lines[:-1],
        "at": at,
        "capacity": room(plan) / 1e6,
        "tokens": plan.batch * plan.length,
        "flops": plan.model.flops(plan.length) * plan.batch * plan.length / plan.cluster.peak(plan.dtype),
    }


def _lines(plan: Plan, rows: Sequence[Strategy]) -> Iterator[list[Any]]:
    hosts = plan.cluster.hosts
    sizes = dict.fromkeys(size for size in (hosts, hosts // 2, 2 * hosts, hosts // 4, 4 * hosts) if size)
    for size in sizes:
        cluster = replace(plan.cluster, hosts=size)
        asked = Question(plan.model, cluster, plan.batch, plan.length, plan.dtype)
        for one in candidates(asked, rows, everything=False):
            yield _line(Candidate.of(one))


def _line(one: Candidate) -> list[Any]:
    """Settings, megabytes by kind, and seconds by part."""
    plan, mesh = one.plan, one.plan.mesh
    settings = [mesh.size, mesh.pipe, mesh.tensor, mesh.context, mesh.expert, mesh.replica, plan.strategy.name]
    sizes = [round(size / 1e6, 1) for size in one.fullest.kinds.values()]
    return [
        *settings,
        plan.microbatches,
        plan.recompute or "none",
        *sizes,
        *(float(f"{part:.4g}") for part in vars(one.duration).values()),
    ]
