"""The small jobs of the verification's tests, and verdicts on their layouts.  Layouts of one job share references."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from planted import Put

from plait.comm import run
from plait.comm.operation import Alone
from plait.referee.verify.locate import first_step, locate_in_plain, replay, search, window_of
from plait.referee.verify.observed import RankRecord, Record
from plait.referee.verify.plain import run_plain
from plait.referee.verify.record import record_run, trace_layout
from plait.referee.verify.reference import run_reference
from plait.referee.verify.run import Verdict, judge
from plait.referee.wrong import FirstWrong
from plait.run.config.settings import VerifyConfig
from plait.run.job.config import JobConfig
from plait.run.job.job import Job, make_job
from plait.table.collectives import Note
from plait.table.mesh import Mesh
from plait.table.precision import Precision
from plait.zero import flat_gradient, gradients

MLP = VerifyConfig(model="mlp", layers=16, width=17, batch=13, steps=5, clip=0.3, bucket=0)
"""16 layers, odd widths, 13 samples: no mesh divides anything evenly.  It is small, and would be one bucket."""
GPT = VerifyConfig(
    model="gpt", layers=2, width=24, heads=2, kv_heads=1, batch=13, length=7, steps=5, clip=0.3, bucket=0
)
TINY = replace(MLP, layers=3, width=5)
CHAIN = replace(TINY, layers=11, steps=2)
"""11 links: uneven on any number of stages up to 8."""
DECODER = replace(GPT, layers=6, steps=2)
"""Embedding, 6 blocks, norm and head: 9 links, of which the first and the last share their weight."""
HEADS = replace(GPT, heads=6, kv_heads=6, length=9, steps=2, dtype="fp64")
"""Six heads for 2 and 3 ranks; 64 hidden features and 256 classes, which 3 ranks share unevenly."""


JOBS: dict[tuple[JobConfig, Precision], Job] = {}
REPLAYS: dict[str, Record] = {}


def job_of(config: VerifyConfig) -> Job:
    """The config's job, made once for all layouts."""
    key = config.task, config.dtypes.precision
    if key not in JOBS:
        JOBS[key] = make_job(config.task, config.dtypes)
    return JOBS[key]


def replayed(job: Job, mesh: Mesh, *rest: Any, **settings: Any) -> Record:
    """``run_reference``, made once for the layouts whose replay is the same run."""
    key = repr((id(job), mesh.replica, mesh.shard, mesh.context, rest, sorted(settings.items())))
    if key not in REPLAYS:
        REPLAYS[key] = run_reference(job, mesh, *rest, **settings)
    return REPLAYS[key]


PLAINS: dict[int, Record] = {}


def plain(job: Job, task: JobConfig, tree: Record) -> Record:
    """``run_plain`` along a replay, which is in ``REPLAYS``, made once."""
    if id(tree) not in PLAINS:
        PLAINS[id(tree)] = run_plain(job, task, tree)
    return PLAINS[id(tree)]


@dataclass
class Verified:
    """A layout's run and what the verification says of it."""

    ranks: list[RankRecord]
    tree: Record
    verdict: Verdict

    def different(self) -> set[str]:
        """The kinds of findings that are not equal, with where they were found."""
        kinds = {f"tree: {f.kind}" for f in self.verdict.tree if not f.equal}
        kinds |= {f"plain: {f.kind}" for f in self.verdict.plain if not f.equal}
        return kinds | ({"ledger"} if self.verdict.ledger else set())


def record(config: VerifyConfig, job: Job | None = None) -> list[RankRecord]:
    """Train the config's layout on thread ranks."""
    made = job or job_of(config)
    return run(config.machine.parsed_mesh, lambda comm: record_run(made, config, comm), deadline=20)


def verify(config: VerifyConfig, **changes: Any) -> Verified:
    """Record a layout and judge it, with references from the cache."""
    config = replace(config, **changes)
    return judged(config, record(config))


def judged(config: VerifyConfig, ranks: list[RankRecord]) -> Verified:
    job = job_of(config)
    tree = replay(job, config, ranks, replayed)
    return Verified(ranks, tree, judge(job, config, ranks, tree, plain(job, config.task, tree)))


def found_in(config: VerifyConfig, put: Put | None = None) -> tuple[Verified, FirstWrong | None]:
    """Returns the verdict on a layout with a fault, and the first wrong tensor; the references have no fault."""
    job = job_of(config)

    def broken(run: Callable[[], list[RankRecord]]) -> list[RankRecord]:
        with pytest.MonkeyPatch.context() as patch:
            if put is not None:
                put(patch)
            return run()

    found = judged(config, broken(lambda: record(config, job)))
    if put is not None and all(finding.equal for finding in found.verdict.tree):
        along = plain(job, config.task, found.tree)
        return found, locate_in_plain(job, found.ranks, found.tree, along, found.verdict.plain)
    window = window_of(first_step(found.verdict.tree))
    return found, search(broken(lambda: trace_layout(job, config, window)), job, config, window)


def not_sent(patch: pytest.MonkeyPatch, lost: Callable[[Any, Note], bool]) -> None:
    """Messages of gradients for which ``lost`` is true are never sent: a mutation."""
    prepare = flat_gradient.prepare

    def begin(comm: Any, message: Any, array: Any, base: int, note: Note, out: Any = None) -> Any:
        return Alone() if lost(message, note) else prepare(comm, message, array, base, note, out)

    patch.setattr(flat_gradient, "prepare", begin)
    patch.setattr(gradients, "prepare", begin)
