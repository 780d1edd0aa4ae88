"""``plait schedule``: pipelines as data, on the screen, proved, and as a picture.  Nothing runs.

    plait schedule show 1f1b --stages 4 --microbatches 8          the grid over time, bubbles against their formula
    plait schedule text zbv --stages 4 --microbatches 4           the schedule, to begin one's own with
    plait schedule check mine.txt                                 a proof, or what is wrong and where
    plait schedule draw 1f1b --out 1f1b.svg                       the timeline and the memory of each rank

Where an order's name stands, the file of a hand-written schedule may stand instead.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from plait.config import names_a_file, read_schedule
from plait.core.cells import find_strategy
from plait.report.schedule import bubble_table, share_line, svg, time_grid
from plait.schedule.actions import Schedule, format_schedule, owners
from plait.schedule.bubbles import Bubbles, bubbles
from plait.schedule.check import Proof, check
from plait.schedule.orders import describe_chunks, describe_orders, find_order, stages_per_rank, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step, merge_messages
from plait.schedule.simulate import Costs, simulate

MOST_PASSES = 256 * 1024
"""Above this many forwards, which take seconds to simulate, the closed forms are shown alone."""


@dataclass(frozen=True)
class Source:
    """An order with its sizes, or a file."""

    order: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help=f"An order ({describe_orders()}), or a file with a schedule.")
    ]
    stages: int | None = None
    """Stages of the whole pipeline; 4 unless given."""
    microbatches: int | None = None
    """Microbatches of a step; 8 unless given."""
    chunks: Annotated[int | None, tyro.conf.arg(help=describe_chunks())] = None


@dataclass(frozen=True)
class Timed(Source):
    """A source and what its passes cost."""

    forward: float = 1.0
    """Time of one stage's forward."""
    input: float = 1.0
    """Time of the input part of a backward."""
    weight: float = 1.0
    """Time of the weight part of a backward."""
    latency: float = 0.0
    """Time of a message from rank to rank."""


@dataclass(frozen=True)
class Show(Timed):
    """Print the grid over time, idle shares against the closed formula, and peak activations."""


@dataclass(frozen=True)
class Draw(Timed):
    """Write the timeline, and the activations each rank holds, as an SVG file."""

    out: str = "schedule.svg"
    """The file to write."""


@dataclass(frozen=True)
class Text(Source):
    """Print the schedule as text, which check, show and draw read back."""

    messages: bool = False
    """With sends and receives."""
    strategy: str | None = None
    """With what a row of the table adds on every rank (ddp, zero1, ... hpz), and the end of the step."""


@dataclass(frozen=True)
class Check:
    """Prove a hand-written schedule. Exit code 0: proved, 2: wrong, with the reason and the place."""

    file: tyro.conf.Positional[str]
    """One line per rank, as in 0F0 0F1 0B0 0B1."""
    in_order: bool = False
    """Refuse gradients that are not added in the order of microbatches."""


@dataclass(frozen=True)
class ScheduleCommand:
    """Show, write, prove or draw a pipeline schedule."""

    what: Annotated[
        Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Text, tyro.conf.subcommand("text")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Draw, tyro.conf.subcommand("draw")],
        tyro.conf.arg(name=""),
    ]
    """What to do with the schedule."""


def run_schedule(command: ScheduleCommand) -> int:
    """One ``plait schedule`` command; returns the exit code."""
    match command.what:
        case Check() as what:
            _check(what)
        case Text() as what:
            _text(what)
        case Show() as what:
            _show(what)
        case Draw() as what:
            _draw(what)
    return 0


def _schedule(source: Source) -> tuple[Schedule, Proof]:
    """The schedule of a source, proved."""
    if names_a_file(source.order):
        for name in ("stages", "microbatches", "chunks"):
            if getattr(source, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(source, name)}, but the file {source.order!r} says it: leave it out"
                )
        schedule = read_schedule(source.order)
    else:
        schedule = write_order(source.order, _stages(source), _microbatches(source), source.chunks)
    return schedule, check(schedule)


def _stages(source: Source) -> int:
    return 4 if source.stages is None else source.stages


def _microbatches(source: Source) -> int:
    return 8 if source.microbatches is None else source.microbatches


def _formula(timed: Timed) -> Bubbles:
    """What the closed forms say; nothing of a file, and nothing of waits where messages take time."""
    if names_a_file(timed.order):
        return Bubbles(None, None, None)
    chunks = stages_per_rank(timed.order, timed.chunks)
    times = (timed.forward, timed.input, timed.weight)
    closed = bubbles(find_order(timed.order).formula, _stages(timed), _microbatches(timed), chunks, *times)
    return Bubbles(None, None, closed.peaks) if timed.latency else closed


def _costs(timed: Timed) -> Costs:
    return Costs(timed.forward, timed.input, timed.weight, latency=timed.latency)


def _check(command: Check) -> None:
    proof = check(read_schedule(command.file), in_order=command.in_order)
    order = "in the order of microbatches" if proof.in_order else "NOT in the order of microbatches"
    print(f"proved: {proof.num_stages} stages on {len(proof.peaks)} ranks, {proof.num_microbatches} microbatches")
    print(f"gradients are added {order}; peak activations per rank: {', '.join(map(str, proof.peaks))}")


def _text(command: Text) -> None:
    schedule, _ = _schedule(command)
    if command.strategy is not None:
        schedule = add_step(add_sharding(schedule, find_strategy(command.strategy)))
    if command.messages:
        schedule = merge_messages(add_messages(schedule))
    check(schedule)
    print(format_schedule(schedule))


def _show(command: Show) -> None:
    formula = _formula(command)
    if not names_a_file(command.order) and _stages(command) * _microbatches(command) > MOST_PASSES:
        share = "none here" if formula.idle_share is None else f"{formula.idle_share:.6f}"
        print(f"{_stages(command)} stages x {_microbatches(command)} microbatches: the closed forms alone")
        peak = max(formula.peaks) if formula.peaks else "none here"
        print(f"idle share of rank 0: {share}; peak activations: {peak}")
        return
    schedule, proof = _schedule(command)
    timeline = simulate(schedule, _costs(command))
    print(time_grid(timeline, shutil.get_terminal_size((120, 24)).columns))
    console = Console()
    console.print(bubble_table(timeline, proof, formula))
    print(share_line(timeline, formula))


def _draw(command: Draw) -> None:
    schedule, proof = _schedule(command)
    ranks = len(set(owners(schedule).values()))
    title = f"{command.order}: {proof.num_stages} stages on {ranks} ranks, {proof.num_microbatches} microbatches"
    try:
        Path(command.out).write_text(svg(simulate(schedule, _costs(command)), _costs(command), title), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {command.out!r}: {error.strerror}") from error
    print(f"written: {command.out}")
