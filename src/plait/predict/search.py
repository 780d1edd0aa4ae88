"""Candidates for a cluster, judged and ranked: those that fit by their seconds, then the others by their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from plait.predict.chain import Chain
from plait.predict.cluster import Cluster
from plait.predict.duration import Duration, duration
from plait.predict.footprint import Footprint, fullest
from plait.predict.model import Transformer
from plait.predict.plan import Plan, implementation
from plait.table.cells import TABLE, Strategy
from plait.table.mesh import DATA_AXES, Mesh

RESERVE = 0.06
"""Share of a device's memory that is left free, for libraries and what the allocator cannot use (docs/planner.md)."""


@dataclass(frozen=True)
class Candidate:
    """A plan, with the memory that it needs and the time that it takes."""

    plan: Plan
    fullest: Footprint
    """The rank of the pipe axis that needs the most."""
    duration: Duration

    @classmethod
    def of(cls, plan: Plan) -> Candidate:
        return cls(plan, fullest(plan), duration(plan))

    @property
    def spare(self) -> float:
        """The bytes that the fullest rank has left; negative if it does not fit."""
        return room(self.plan) - self.fullest.total

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def tokens(self) -> float:
        """The tokens per second, over all devices."""
        return self.plan.batch * self.plan.length / self.duration.total

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation: the share of the peak that the model's own FLOPs take."""
        plan = self.plan
        return plan.model.flops(plan.length) * self.tokens / (plan.cluster.size * plan.cluster.peak(plan.dtype))


def room(plan: Plan) -> float:
    """The bytes of a device that a plan may use."""
    return plan.cluster.device.memory * (1 - RESERVE)


def ranked(plans: Iterable[Plan]) -> list[Candidate]:
    """Judges plans.  Plans that fit come first, the fastest in front; then the others, the nearest in front."""
    found = [Candidate.of(plan) for plan in plans]
    return sorted(found, key=lambda one: (not one.fits, one.duration.total if one.fits else -one.spare))


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclass(frozen=True)
class Question:
    """The part of a plan that all candidates share."""

    model: Transformer | Chain
    cluster: Cluster
    batch: int
    length: int
    dtype: str = "bf16"


def meshes(asked: Question) -> Iterator[Mesh]:
    """Yields meshes of all devices that can cut this model and batch: a tensor group is inside a host, long samples may
    be cut in time, and ranks may share experts."""
    model, cluster = asked.model, asked.cluster
    for tensor in divisors(cluster.devices):
        if model.uncut(tensor) is not None:
            continue
        for pipe in divisors(cluster.size // tensor):
            data = cluster.size // tensor // pipe
            if pipe > min(model.most_stages, MOST_STAGES):
                continue
            shard = cluster.devices // tensor
            cuts = [(1, data)] + [(data // shard, shard)] * (1 < shard < data and data % shard == 0)
            for replica, shard in cuts:
                for context in divisors(shard):
                    if context > 1 and (asked.length % (2 * context) or asked.length < LEAST_STEPS * context):
                        continue
                    if asked.batch % (data // context) == 0:
                        for expert in divisors(shard) if model.experts else (1,):
                            mesh = Mesh(pipe, replica, shard, tensor, cluster.hosts, context, expert)
                            if model.unshared(mesh) is None:
                                yield mesh


LEAST_STEPS = 8192
"""The fewest steps of time on a rank for which a search tries a context axis."""


def candidates(asked: Question, rows: Sequence[Strategy], *, everything: bool = True) -> Iterator[Plan]:
    """Yields plans for every mesh, row, order, number of microbatches and recomputation.

    Args:
        rows: rows of the table; rows with two levels are for meshes with both data axes.
        everything: also try orders other than 1F1B, and selective recomputation.
    """
    how = implementation(asked.model, asked.cluster)
    modes: tuple[str | None, ...] = (None, "selective", "full") if everything else (None, "full")
    modes = (None,) if isinstance(asked.model, Chain) else modes
    for mesh in meshes(asked):
        orders: list[tuple[str | None, int | None]] = [(None, None)]
        if mesh.pipe > 1:
            orders = [("1f1b", None), *[("zb_h1", None)] * everything]
            orders += [("interleaved", 2)] * (everything and 2 * mesh.pipe <= asked.model.most_stages - 3)
        usable = [row for row in rows if (mesh.replica > 1) == two_levels(row)]
        ways = (False, True) if mesh.expert > 1 else (False,)
        for row, exchanges in product(usable[:1] if mesh.count(DATA_AXES) == 1 else usable, ways):
            for m in divisors(asked.batch // mesh.data_size):
                for order, chunks in orders if mesh.pipe == 1 or m >= mesh.pipe else ():
                    if order == "interleaved" and m % mesh.pipe:
                        continue
                    for recompute in modes:
                        yield Plan(
                            *(asked.model, asked.cluster, mesh, row, asked.batch, asked.length, m, order, chunks),
                            recompute=recompute,
                            sequence_parallel=mesh.tensor > 1,
                            dtype=asked.dtype,
                            all_to_all=exchanges,
                            **how,
                        )


MOST_STAGES = 64
"""The largest pipe axis that a search tries."""


def two_levels(row: Strategy) -> bool:
    """True if a row cuts some state over ``shard`` alone, and is meant for meshes with both data axes."""
    return any(cell.split == ("shard",) for cell in (row.params, row.kept, row.grads, row.optim))


Change = tuple[str, Mapping[str, Any]]
"""A change of a plan: its words, and the fields that it replaces."""


def smallest_change(plan: Plan, rows: Sequence[Strategy]) -> tuple[str, Candidate] | None:
    """The change of one setting, or otherwise of two, with which a plan fits and is fastest; None if there is none."""
    changes = _changes(plan, rows)
    pairs = ((f"{a} {b}", {**one, **two}) for (a, one), (b, two) in combinations(changes, 2))
    return _fastest(plan, changes) or _fastest(plan, pairs)


def faster_change(plan: Plan, rows: Sequence[Strategy]) -> tuple[str, Candidate] | None:
    """The change of one setting with which a plan fits and is fastest; None if none saves ``WORTH_SAVING``."""
    changes = _changes(plan, rows)
    changes += [("without --recompute", {"recompute": None})] * (plan.recompute is not None)
    counts = divisors(plan.batch // plan.mesh.data_size)
    changes += [(f"--microbatches {m}", {"microbatches": m}) for m in counts if m < plan.microbatches]
    if plan.mesh.pipe > 1:
        changes += [(f"--schedule {name}", {"schedule": name, "chunks": None}) for name in ("1f1b", "zb_h1")]
        changes.append(("--schedule interleaved --chunks 2", {"schedule": "interleaved", "chunks": 2}))
    found = _fastest(plan, changes)
    return found if found and found[1].duration.total < (1 - WORTH_SAVING) * Candidate.of(plan).duration.total else None


WORTH_SAVING = 0.01
"""The share of a step that a change has to save."""


def _changes(plan: Plan, rows: Sequence[Strategy]) -> list[Change]:
    """Changes of one setting that may save memory."""
    changes: list[Change] = [(f"--recompute {mode}", {"recompute": mode}) for mode in ("selective", "full")]
    usable = [row for row in rows if plan.mesh.replica > 1 or not two_levels(row)]
    changes += [(f"--strategy {row.name}", {"strategy": row}) for row in usable]
    counts = divisors(plan.batch // plan.mesh.data_size)
    changes += [(f"--microbatches {m}", {"microbatches": m}) for m in counts if m > plan.microbatches]
    if plan.mesh.expert > 1 and not plan.all_to_all:
        changes.append(("--all-to-all", {"all_to_all": True}))
    if plan.mesh.tensor > 1:
        changes.append(("--sequence-parallel", {"sequence_parallel": True}))
    return changes


def _fastest(plan: Plan, changes: Iterable[Change]) -> tuple[str, Candidate] | None:
    found = []
    for words, changed in changes:
        with suppress(ValueError):  # a change that does not fit the rest
            found.append((words, Candidate.of(replace(plan, **changed))))
    return min((each for each in found if each[1].fits), key=lambda each: each[1].duration.total, default=None)


def rows_in(dtype: str, *, mixed: bool, offload: bool = False) -> list[Strategy]:
    """The rows of the table, in mixed precision and with the optimizer on the CPU if asked."""
    rows = [row.mixed(dtype) if mixed else row for row in TABLE.values()]
    return [row.offloaded() for row in rows] if offload else rows
