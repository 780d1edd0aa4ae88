"""``plait verify``: run a layout and a single process, and say whether they are the same run.

layout on N ranks ──► records ──┐
one process, the layout's own tree of additions ──► bitwise ──► verdict
one process, one plain full-batch step          ──► rounding ─┘
the table's predicted messages and bytes        ──► the ledger
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from plait.comm import Comm
from plait.config import RunConfig, VerifyConfig
from plait.core.additions import additions
from plait.job.job import Job, make_job
from plait.verify.compare import (
    BITWISE,
    Finding,
    Measures,
    Summary,
    against_plain,
    against_tree,
    summarise,
)
from plait.verify.plain import run_plain
from plait.verify.record import RankRecord, collect_records, record_run
from plait.verify.reference import Record, run_reference

WORST = 8
"""How many unequal findings are printed by name."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification.

    ``tree`` holds the findings against the replay of the layout's tree, ``plain`` those against one plain full-batch
    step, ``ledger`` the messages in which prediction and measurement differ.
    """

    layout: str
    tree: tuple[Finding, ...]
    plain: tuple[Finding, ...]
    ledger: tuple[str, ...]
    left_out: int = 0
    """Steps that were skipped, because their scaled gradients were not finite."""
    none_made: bool = False
    """All of them: then nothing is proved."""

    @property
    def bitwise(self) -> bool:
        return all(f.bitwise for f in self.tree)

    @property
    def equal(self) -> bool:
        return all(f.equal for f in (*self.tree, *self.plain)) and not self.ledger and not self.none_made

    @property
    def word(self) -> str:
        """The verdict in a word: bitwise, equal or different."""
        return "bitwise" if self.equal and self.bitwise else "equal" if self.equal else "different"


def references(job: Job, config: RunConfig, ranks: Sequence[RankRecord]) -> tuple[Record, Record]:
    """The two single-process runs: the layout's own tree of additions, and one plain full batch per step."""
    return replay(job, config, ranks), run_plain(job, config)


def replay(
    job: Job,
    config: RunConfig,
    ranks: Sequence[RankRecord],
    run: Callable[..., Record] = run_reference,
    **options: Any,
) -> Record:
    """The single process that adds in the order of the config's layout, of which these are the records."""
    pieces = [r.norm_pieces for r in sorted(ranks, key=lambda r: r.rank)] if asked(config) == BITWISE else None
    layout = config.parsed_mesh, config.microbatches, additions(config.row), config.steps
    return run(job, *layout, clip=config.clip, norm_pieces=pieces, ties=ranks[0].ties, **options)


def judge(job: Job, config: RunConfig, ranks: Sequence[RankRecord], tree: Record, plain: Record) -> Verdict:
    """Compare the ranks' records with both references."""
    amplifies = config.optimizer_row.amplifies
    return Verdict(
        f"{config.row.name} on {config.parsed_mesh}, microbatches per rank: {config.microbatches}",
        tuple(against_tree(ranks, tree, asked(config))),
        tuple(against_plain(ranks, plain, job.dtype, config.lr, config.steps, amplifies=amplifies)),
        tuple(difference for r in ranks for difference in r.ledger_differences),
        left_out=ranks[0].made.count(False),
        none_made=not any(ranks[0].made),
    )


def asked(config: RunConfig) -> Measures:
    """The same bits, unless the mesh has a tensor axis."""
    if config.parsed_mesh.tensor == 1:
        return BITWISE
    return Measures.split_products(
        config.torch_dtype, config.lr, config.steps, amplifies=config.optimizer_row.amplifies
    )


def run_verify(config: VerifyConfig, comm: Comm) -> int:
    """This rank's part of a verification; rank 0 compares, prints and returns the exit code (0 equal, 1 not)."""
    job = make_job(config)
    config = replace(config, steps=job.steps)  # epochs have become steps
    ranks = collect_records(comm, record_run(job, config, comm))
    if ranks is None:
        return 0
    verdict = judge(job, config, ranks, *references(job, config, ranks))
    if config.json:
        write_json(config.json, report(verdict))
    if config.json != "-":
        show(verdict, Console(highlight=False), every_tensor=config.tensors)
    return 0 if verdict.equal else 1


def report(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain data: every finding, and the summaries that the screen shows."""
    return {
        "layout": verdict.layout,
        "verdict": verdict.word,
        "equal": verdict.equal,
        "bitwise": verdict.bitwise,
        "ledger_differences": list(verdict.ledger),
        "against_tree": [asdict(f) | {"equal": f.equal} for f in verdict.tree],
        "against_plain": [asdict(f) | {"equal": f.equal} for f in verdict.plain],
    }


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write to a file, or to the standard output for ``-``."""
    text = json.dumps(data, indent=1)
    if path == "-":
        sys.stdout.write(text + "\n")
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def show(verdict: Verdict, console: Console, *, every_tensor: bool = False) -> None:
    """Print the two comparisons and the verdict; ``every_tensor`` adds a line for each finding."""
    console.print(f"[bold]{verdict.layout}[/bold]")
    console.print(findings_table("against one process that adds in this layout's order", summarise(verdict.tree)))
    console.print(findings_table("against plain PyTorch, one full batch a step", summarise(verdict.plain)))
    for finding in (*verdict.tree, *verdict.plain) if every_tensor else ():
        console.print(line_of(finding), soft_wrap=True)
    for finding in [f for f in (*verdict.tree, *verdict.plain) if not f.equal][:WORST]:
        console.print(line_of(finding), soft_wrap=True)
    if verdict.ledger:
        console.print(f"ledger: {len(verdict.ledger)} messages differ from the prediction")
        for line in verdict.ledger[:5]:
            console.print(f"  {line}")
    else:
        console.print("ledger: every message as predicted, byte for byte")
    if verdict.left_out:
        console.print(f"steps skipped, gradients not finite under the loss scale: {verdict.left_out}")
    if verdict.none_made:
        console.print("no step was made, so nothing is proved: give a smaller --loss-scale")
    colour = "green" if verdict.equal else "red"
    console.print(f"verdict: [bold {colour}]{verdict.word}[/bold {colour}]")


def line_of(finding: Finding) -> str:
    """One finding as a line."""
    unit = "" if finding.measure == "relative" else " lr*k"
    bound = "bitwise" if finding.tolerance == 0 else f"{finding.tolerance:.0e}{unit}"
    return (
        f"  {finding.kind} {finding.name}: max abs {finding.max_abs:.3g}, max rel {finding.max_rel:.3g}, "
        f"{'bitwise' if finding.bitwise else 'not bitwise'}, asked {bound}, {'equal' if finding.equal else 'DIFFERENT'}"
    )


def findings_table(title: str, lines: Sequence[Summary]) -> Table:
    """One line per kind of what was compared."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("", "compared", "max abs", "max rel", "bitwise", "tolerance", "verdict"):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for line in lines:
        unit = "" if line.measure == "relative" else " lr*k"
        table.add_row(
            line.kind,
            str(line.count),
            f"{line.max_abs:.2g}",
            f"{line.max_rel:.2g}",
            "yes" if line.bitwise else "no",
            "bitwise" if line.tolerance == 0 else f"{line.tolerance:.0e}{unit}",
            "equal" if line.equal else "[red]DIFFERENT[/red]",
        )
    return table
