"""``plait schedule``: prints, proves and draws pipeline schedules.  Nothing runs.

plait schedule show 1f1b --stages 4 --microbatches 8          prints the grid over time, bubbles against their formula
plait schedule text zbv --stages 4 --microbatches 4           prints the schedule, as a start for a hand-written one
plait schedule check mine.txt                                 prints a proof, or what is wrong and where
plait schedule draw 1f1b --out 1f1b.svg                       draws the timeline and the memory of each rank
"""

from __future__ import annotations  # help texts list the orders when they are requested

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from plait.checkpoint.files.writing import check_file, write_text
from plait.messages.escape import say
from plait.run.config.layout import names_a_file, read_schedule
from plait.run.report.drawing import svg
from plait.run.report.schedule import bubble_table, share_line, time_grid
from plait.run.report.screen import screen
from plait.schedule.actions import MOST_PASSES, MOST_STAGES, Schedule, format_schedule
from plait.schedule.bubbles import Bubbles, bubbles
from plait.schedule.check import Proof, check
from plait.schedule.orders import describe_chunks, describe_orders, find_order, stages_per_rank, write_order
from plait.schedule.simulate import Costs, simulate


def _tell(*lines: str) -> None:
    say("".join(f"{line}\n" for line in lines), sys.stdout)


@dataclass(frozen=True)
class Source:
    """A named schedule with its sizes, or a file."""

    order: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help=f"An order ({describe_orders()}), or a file with a schedule.")
    ]
    stages: int | None = None
    """Stages of the whole pipeline; 4 unless given."""
    microbatches: int | None = None
    """Microbatches of a step; 8 unless given."""
    chunks: Annotated[int | None, tyro.conf.arg(help=describe_chunks())] = None

    def sizes(self) -> tuple[int, int]:
        return 4 if self.stages is None else self.stages, 8 if self.microbatches is None else self.microbatches

    def schedule(self) -> tuple[Schedule, Proof]:
        """Builds or reads the schedule, and proves it."""
        if names_a_file(self.order):
            for name in ("stages", "microbatches", "chunks"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name} is {value}, but the file {self.order!r} says it: leave it out")
            schedule = read_schedule(self.order)
        else:
            schedule = write_order(self.order, *self.sizes(), self.chunks)
        return schedule, check(schedule)


@dataclass(frozen=True)
class Show(Source):
    """Print the grid over time, idle shares against the closed formula, and peak activations."""

    def run(self) -> None:
        formula, (stages, microbatches) = self.formula(), self.sizes()
        if not names_a_file(self.order) and (stages > MOST_STAGES or stages * microbatches > MOST_PASSES):
            share = "none here" if formula.idle_share is None else f"{formula.idle_share:.6f}"
            return _tell(
                f"{stages} stages x {microbatches} microbatches: the closed forms alone",
                f"idle share of rank 0: {share}; peak activations: {max(formula.peaks or (), default='none here')}",
            )
        schedule, proof = self.schedule()
        timeline = simulate(schedule, Costs())
        _tell(time_grid(timeline, shutil.get_terminal_size((120, 24)).columns))
        screen().print(bubble_table(timeline, proof, formula))
        _tell(share_line(timeline, formula))

    def formula(self) -> Bubbles:
        """Idle shares by the closed forms; none for a file.  A forward and each part of a backward take 1."""
        if names_a_file(self.order):
            return Bubbles(None, None, None)
        chunks = stages_per_rank(self.order, self.chunks)
        return bubbles(find_order(self.order).formula, *self.sizes(), chunks, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Draw(Source):
    """Write the timeline, and the activations each rank holds, as an SVG file."""

    out: str = "schedule.svg"
    """The file to write."""

    def run(self) -> None:
        check_file("out", self.out)
        schedule, proof = self.schedule()
        sizes = f"{proof.num_stages} stages on {len(set(proof.owner))} ranks, {proof.num_microbatches} microbatches"
        picture = svg(simulate(schedule, Costs()), f"{self.order}: {sizes}", Costs())
        write_text(self.out, picture)
        _tell(f"written: {self.out}")


@dataclass(frozen=True)
class Text(Source):
    """Print the schedule as text, which check, show and draw read back."""

    def run(self) -> None:
        _tell(format_schedule(self.schedule()[0]))


@dataclass(frozen=True)
class Check:
    """Prove a hand-written schedule. Exit code 0: proved, 2: wrong, with the reason and the place."""

    file: tyro.conf.Positional[str]
    """One line per rank, as in 0F0 0F1 0B0 0B1."""

    def run(self) -> None:
        proof = check(read_schedule(self.file))
        order = "in the order of microbatches" if proof.in_order else "NOT in the order of microbatches"
        _tell(
            f"proved: {proof.num_stages} stages on {len(proof.peaks)} ranks, {proof.num_microbatches} microbatches",
            f"gradients are added {order}; peak activations per rank: {', '.join(map(str, proof.peaks))}",
        )


Operation = (
    Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Text, tyro.conf.subcommand("text")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Draw, tyro.conf.subcommand("draw")]
)


def run(config: Operation, argv: Sequence[str]) -> int:
    config.run()
    return 0
