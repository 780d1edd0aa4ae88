"""``plait verify``: runs a layout and a single process, and says whether they are the same run.

layout on N ranks ──► records ──┐
one process, the layout's own tree of additions ──► bitwise ──► verdict
one process, one plain full-batch step          ──► rounding ─┘
the table's predicted messages and bytes        ──► the ledger
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.checkpoint.files.writing import write_json
from plait.comm import Comm
from plait.messages.escape import one_line
from plait.referee.verify.compare import BITWISE, Finding, HonestRuns, against_plain, against_tree
from plait.referee.verify.kernels import repeatable
from plait.referee.verify.locate import locate, locate_in_plain, replay, required
from plait.referee.verify.observed import RankRecord, Record
from plait.referee.verify.plain import run_plain
from plait.referee.verify.probe_token import as_data, probe_tokens
from plait.referee.verify.record import ON_TENSOR, collect_records, in_threads, left_out, record_run
from plait.referee.verify.spread import RUNS, Spread, honest_runs, spread_of
from plait.referee.wrong import FirstWrong
from plait.run.config.check import validate
from plait.run.config.machine import resolve_device
from plait.run.config.settings import RunConfig, VerifyConfig, with_job
from plait.run.job.job import Job, make_job
from plait.run.job.own import UserJob
from plait.run.report.screen import screen, working

WORST = 8  # the unequal findings of a table that are printed by name
BESIDE_TREE = "the layout against one process that adds in the layout's order"
BESIDE_PLAIN = "that one process against plain PyTorch, one full batch a step"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification.

    ``tree`` has the findings against the replay of the layout's tree, ``plain`` those against one plain full-batch
    step, ``ledger`` the messages in which prediction and measurement differ.  ``left_out`` counts the steps that were
    skipped because their scaled gradients were not finite; if no step was made, nothing is proved.  ``irregular`` has
    the units that ``record.irregular`` names, with their number of runs: their gathers are not compared.  ``spread``
    places the layout among honest runs.  ``first`` is the first wrong tensor, if a search found it; ``unplaced`` says
    why there is none.
    """

    layout: str
    tree: tuple[Finding, ...]
    plain: tuple[Finding, ...]
    ledger: tuple[str, ...]
    left_out: int = 0
    none_made: bool = False
    irregular: Mapping[str, float] = field(default_factory=dict)
    spread: Spread | None = None
    first: FirstWrong | None = None
    unplaced: str = ""
    looked: int = 0
    """The number of honest runs that were made because something is beyond its tolerance."""
    unpredicted: bool = False
    """True if messages over the tensor axis were not compared."""

    @property
    def bitwise(self) -> bool:
        """True if every number has the bits of the single process that adds in the layout's order."""
        return all(f.bitwise for f in self.tree)

    @property
    def equal(self) -> bool:
        """True if everything is within its tolerance and the spread of honest runs, and all messages were predicted."""
        return self.within and not self.ledger and not self.none_made

    @property
    def within(self) -> bool:
        """True if every number is right."""
        return all(f.equal for f in (*self.tree, *self.plain)) and (self.spread is None or self.spread.benign)

    def __str__(self) -> str:
        """The verdict, with the unequal findings."""
        unequal = worst_of((*self.tree, *self.plain))
        placed = [str(told) for told in (self.first or self.unplaced, self.spread) if told]
        return "\n".join([f"{self.layout}: {self.word}", *placed, *map(line_of, unequal), *self.ledger[:WORST]])

    @property
    def word(self) -> str:
        """The verdict in a word: bitwise, equal or different."""
        return "bitwise" if self.equal and self.bitwise else "equal" if self.equal else "different"


def references(job: Job, config: RunConfig, ranks: Sequence[RankRecord]) -> tuple[Record, Record]:
    """Runs the two references: the layout's own tree of additions, and one plain full batch per step along it."""
    tree = replay(job, config, ranks)
    return tree, run_plain(job, config.task, tree)


def judge(job: Job, config: VerifyConfig, ranks: Sequence[RankRecord], tree: Record, plain: Record) -> Verdict:
    """Compares the ranks' records with both references, and with honest runs if asked or needed."""
    needed = RUNS if config.machine.parsed_mesh.tensor > 1 and job.dtype.itemsize == 2 else 0
    runs = needed if config.comparison.spread is None else config.comparison.spread
    honest, asked = honest_runs(job, config, ranks, runs) if runs else None, required(config)

    def compared(honest: HonestRuns | None) -> tuple[list[Finding], list[Finding]]:
        seen = honest and replace(honest, unit=0.0)  # only the differences seen excuse
        of_tree = against_tree(ranks, tree, asked, None if asked == BITWISE else seen)
        return of_tree, against_plain(tree, plain, config.dtypes.computed, seen)

    def enough(honest: HonestRuns) -> bool:
        return all(finding.equal for findings in compared(honest) for finding in findings)

    of_tree, of_plain = compared(None)
    looked = 0
    if config.comparison.spread != 0 and _may_be_rounding(of_tree, of_plain, bits=asked == BITWISE):
        excusing = honest or honest_runs(job, config, ranks, enough=enough)
        looked = 0 if honest else len(excusing.runs)
        of_tree, of_plain = compared(excusing)
    return Verdict(
        f"{config.row.name} on {config.machine.parsed_mesh}, microbatches per rank: {config.layout.microbatches}",
        tuple(of_tree),
        tuple(of_plain),
        tuple(difference for r in ranks for difference in r.ledger_differences),
        ranks[0].made.count(False),
        not any(ranks[0].made),
        {name: runs for r in ranks for name, runs in r.irregular.items()},
        spread_of(ranks, honest) if honest else None,
        looked=looked,
        unpredicted=config.machine.parsed_mesh.count(("tensor", "context", "expert")) > 1 and not job.one_stream,
    )


def _may_be_rounding(of_tree: Sequence[Finding], of_plain: Sequence[Finding], *, bits: bool) -> bool:
    """True if honest runs could explain the unequal findings: not the first loss, nor values that must have the same
    ``bits``."""
    wrong = [not finding.equal for finding in (*of_tree, *of_plain)]
    return any(wrong) and of_tree[0].equal and of_plain[0].equal and not (bits and any(wrong[: len(of_tree)]))


def verify(job: UserJob, mesh: str = "shard=2", strategy: str = "zero3", **settings: Any) -> Verdict:
    """Compares a layout of a user's job with a single process, on threads of this process::

        verdict = plait.verify(job, mesh="replica=2 shard=2", strategy="hsdp", microbatches=3)
        assert verdict.equal, verdict

    Args:
        job: model, loss, batches and optimizer.
        mesh: the axes and their sizes.
        strategy: a row of the table, or your own as text.
        settings: the flags of ``plait verify``, with _ for - (``VerifyConfig``).

    Returns:
        The verdict; see ``equal`` and ``bitwise``.

    Raises:
        ValueError: the layout is impossible; with the numbers and the fix.
    """
    config = with_job(VerifyConfig(job=job, mesh=mesh, strategy=strategy, **settings))
    validate(config)
    made = make_job(config.task, config.dtypes)
    with repeatable(resolve_device(config.machine)):
        ranks = in_threads(made, config)
        tree, plain = references(made, config, ranks)
        return placed(judge(made, config, ranks, tree, plain), made, config, ranks, (tree, plain))


WITHIN_TOLERANCE = (
    "every tensor is within its tolerance, so there is no first wrong one to name: with --dtype fp64 rounding is "
    "smaller by nine digits, and a fault is not"
)
RIGHT_THIS_TIME = (
    "the layout ran again among threads of one process, and all was right there: look at the world (its collectives, "
    "its processes, a program that reads RANK), or for what is not the same in each run"
)


def placed(
    verdict: Verdict, job: Job, config: VerifyConfig, ranks: Sequence[RankRecord], references: tuple[Record, Record]
) -> Verdict:
    """Adds the first wrong tensor to the verdict, if more than messages differs; the layout may run again."""
    tree, plain = references
    if not config.comparison.locate or verdict.within:
        return verdict
    if all(f.equal for f in (*verdict.tree, *verdict.plain)):
        return replace(verdict, unplaced=WITHIN_TOLERANCE)
    only_plain = all(f.equal for f in verdict.tree)
    try:
        if only_plain:
            return replace(verdict, first=locate_in_plain(job, ranks, tree, plain, verdict.plain))
        first = locate(job, config, ranks, verdict.tree)
    except Exception as error:  # the verdict holds in any case
        return replace(verdict, unplaced=f"the first wrong tensor could not be looked for: {one_line(str(error))}")
    right = "the layout is right where it is not compiled" if config.task.network.compile else RIGHT_THIS_TIME
    wrong = min(
        (f for f in verdict.tree if not f.equal), key=lambda f: (f.step < 0, f.step, "microbatch" not in f.name)
    )
    return replace(
        verdict, first=first, unplaced="" if first else f"{right}; in the first run: {line_of(wrong).strip()}"
    )


def run_verify(config: VerifyConfig, comm: Comm, argv: Sequence[str] = ()) -> int:
    """Runs this rank's part of a verification; rank 0 compares, prints and returns the exit code (0 equal, 1 not).

    ``argv`` repeats the command.
    """
    job = make_job(config.task, config.dtypes)
    if config.comparison.probe_token:
        return run_probe(job, config, comm)
    config = config.with_flags(steps=job.steps)  # epochs have become steps
    with working(comm.rank == 0):
        ranks = collect_records(comm, record_run(job, config, comm))
        if ranks is None:
            return 0
        tree, plain = references(job, config, ranks)
        verdict = judge(job, config, ranks, tree, plain)
    again = {"command": shlex.join(["plait", *argv])}
    if config.files.json != "-":
        show(verdict, screen(), every_tensor=config.comparison.tensors)
        write_json(config.files.json, report(verdict) | again)  # the search may not fit into memory
    with working():
        verdict = placed(verdict, job, config, ranks, (tree, plain))
    if config.files.json and (config.files.json == "-" or verdict.first or verdict.unplaced):
        write_json(config.files.json, report(verdict) | again)
    if config.files.json != "-" and (verdict.first or verdict.unplaced):
        screen().print(Text(str(verdict.first or verdict.unplaced)), soft_wrap=True)
    return 0 if verdict.equal else 1


def run_probe(job: Job, config: VerifyConfig, comm: Comm) -> int:
    """Runs this rank's part of a one-token probe; returns 1 on rank 0 if a token leaks."""
    probed = probe_tokens(job, comm, config.parallelism, config.layout.microbatches)
    if comm.rank:
        return 0
    write_json(config.files.json, as_data(probed))
    if config.files.json != "-":
        for one in probed:
            screen().print(Text(str(one)), soft_wrap=True)
    return int(not all(one.right for one in probed))


def report(verdict: Verdict) -> dict[str, Any]:
    """The verdict and all findings as plain data."""
    return {
        "layout": verdict.layout,
        "verdict": verdict.word,
        "equal": verdict.equal,
        "bitwise": verdict.bitwise,
        "ledger_differences": list(verdict.ledger),
        "irregular_units": dict(verdict.irregular),
        "first_wrong": verdict.first.as_data() if verdict.first else None,
        "unplaced": verdict.unplaced,
        "spread": asdict(verdict.spread) | {"benign": verdict.spread.benign} if verdict.spread else None,
        "against_tree": [asdict(f) | {"equal": f.equal} for f in verdict.tree],
        "against_plain": [asdict(f) | {"equal": f.equal} for f in verdict.plain],
    }


def show(verdict: Verdict, console: Console, *, every_tensor: bool = False) -> None:
    """Prints the two comparisons and the verdict; ``every_tensor`` adds a line for each finding."""
    console.print(verdict.layout, style="bold")
    for title, findings in ((BESIDE_TREE, verdict.tree), (BESIDE_PLAIN, verdict.plain)):
        console.print(findings_table(title, findings))
        for finding in (*(findings if every_tensor else ()), *worst_of(findings)):
            console.print(line_of(finding), soft_wrap=True)
    if verdict.ledger:
        console.print(f"ledger: {len(verdict.ledger)} messages differ from the prediction")
        for line in verdict.ledger[:5]:
            console.print(f"  {line}")
    else:
        console.print("ledger: every message as predicted, byte for byte")
    if verdict.unpredicted:
        console.print(f"  {ON_TENSOR}")
    if verdict.irregular:
        console.print(f"  {left_out(verdict.irregular)}", soft_wrap=True)
    if verdict.spread:
        console.print(str(verdict.spread), soft_wrap=True)
    if verdict.looked:
        console.print(
            f"{verdict.looked} honest runs of one process were made, because something is beyond its tolerance: they "
            f"{'differ as much' if verdict.within else 'do not differ as much'} (--spread 0 leaves them out)",
            soft_wrap=True,
        )
    if verdict.left_out:
        console.print(f"steps skipped, gradients not finite under the loss scale: {verdict.left_out}")
    if verdict.none_made:
        console.print("no step was made, so nothing is proved: give a smaller --loss-scale")
    console.print(Text.assemble("verdict: ", (verdict.word, "bold green" if verdict.equal else "bold red")))


def worst_of(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that are not equal, NaN and the largest difference first."""
    unequal = (f for f in findings if not f.equal)
    return sorted(unequal, key=lambda f: (math.isnan(f.measured), f.measured), reverse=True)[:WORST]


def line_of(finding: Finding) -> str:
    """One finding as a line."""
    return (
        f"  {finding.kind} {finding.name}: max abs {finding.max_abs:.3g}, max rel {finding.max_rel:.3g}, "
        f"{'bitwise' if finding.bitwise else 'not bitwise'}, asked {finding.asked}, "
        f"{'equal' if finding.equal else 'DIFFERENT'}"
    )


def findings_table(title: str, findings: Sequence[Finding]) -> Table:
    """A line for each kind of finding: their number, the largest errors, and the verdict of the worst one."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("", "compared", "max abs", "max rel", "bitwise", "tolerance", "verdict"):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for kind in dict.fromkeys(finding.kind for finding in findings):
        group = [finding for finding in findings if finding.kind == kind]
        worst = max(group, key=lambda f: (not f.equal, not f.bitwise, f.measured))
        table.add_row(
            kind,
            str(len(group)),
            f"{max(f.max_abs for f in group):.2g}",
            f"{max(f.max_rel for f in group):.2g}",
            "yes" if worst.bitwise else "no",
            worst.asked,
            "equal" if worst.equal else Text("DIFFERENT", "red"),
        )
    return table
