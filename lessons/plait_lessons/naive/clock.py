"""A pipeline by the clock: in each tick every rank does at most one action, and hand-offs happen between ticks.

    print(draw(tabulate(gpipe(3, 4))))          the picture of the GPipe paper

    rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

A schedule says in which order a rank works, not when.  ``tabulate`` gives it time, a tick for each pass: a rank goes on
with its line as soon as what the next pass needs was made in an *earlier* tick.  ``run`` carries the table out in one
process, with autograd by hand (``hand_off.py``).  All of a tick's passes read what lay there before it, so ranks in one
tick could as well work at the same time.

Backwards that are split: I makes the gradient of the stage's input and keeps the graph, W goes through it again for the
gradients of the weights.  That is more work than a real split, and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.schedule.actions import PASSES, Action, Kind, Schedule, Value, activations, makes, needs
from plait.schedule.check import check
from plait_lessons.naive.hand_off import LossOf, receive
from plait_lessons.naive.microbatcher import Pair, total_count

Row = tuple[Action | None, ...]
Table = tuple[Row, ...]
"""A row per tick, in it a cell per rank: a pass, or None where the rank waits."""


def tabulate(schedule: Schedule) -> Table:
    """Each pass of a schedule in the earliest tick that its rank's line and its needs allow.

    Raises:
        ValueError: a schedule that ``check`` refuses, or one with more than passes in it.
    """
    for action in (action for line in schedule for action in line if action.kind not in PASSES):
        raise ValueError(
            f"'{action}' is no pass: the clock knows F, B, I and W, and hands over by itself; give it the order as "
            f"plait.schedule.orders writes it, before messages, sharding and the end of a step are added"
        )
    num_stages = check(schedule).num_stages
    at = [0] * len(schedule)
    there: set[Value | None] = set()
    table: list[Row] = []
    while any(at[rank] < len(line) for rank, line in enumerate(schedule)):
        coming = [line[at[rank]] if at[rank] < len(line) else None for rank, line in enumerate(schedule)]
        row = tuple(None if a is None or _lacks(a, there, num_stages) else a for a in coming)
        at = [index + (action is not None) for index, action in zip(at, row, strict=True)]
        there |= {makes(action) for action in row if action is not None}
        table.append(row)
    return tuple(table)


def _lacks(action: Action, there: Set[Value | None], num_stages: int) -> list[Value]:
    """What a pass needs and is not there."""
    return [value for value in needs(action, num_stages) if value not in there]


def idle_share(table: Table) -> float:
    """The share of cells in which a rank waits."""
    cells = [action for row in table for action in row]
    return cells.count(None) / len(cells)


def draw(table: Table) -> str:
    """The table with time to the right: a line per rank, a column per tick; ``.`` where the rank waits."""
    lines = []
    for rank, column in enumerate(zip(*table, strict=True)):
        several = len({action.stage for action in column if action is not None}) > 1
        lines.append([f"rank {rank}", "|", *("." if a is None else _label(a, several) for a in column)])
    wide = max((len(cell) for line in lines for cell in line[2:]), default=1)
    head = max((len(line[0]) for line in lines), default=0)
    return "\n".join(
        " ".join([line[0].ljust(head), line[1], *(cell.ljust(wide) for cell in line[2:])]).rstrip() for line in lines
    )


def _label(action: Action, several: bool) -> str:
    return f"{action.stage if several else ''}{action.kind.value}{action.microbatch}"


# ---- carrying it out --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """One line of the log."""

    actions: Row
    held: tuple[int, ...]
    """Per rank, the activations it holds during the tick: pairs of stage and microbatch, from F through B or W."""


@dataclass(frozen=True)
class ClockRun:
    """What a step came to; the gradients are in the parameters' ``.grad``."""

    losses: tuple[Tensor, ...]
    """Each microbatch's loss sum."""
    log: tuple[Tick, ...]

    @property
    def peaks(self) -> tuple[int, ...]:
        """Per rank, the most activations that it held at once."""
        return tuple(map(max, zip(*(tick.held for tick in self.log), strict=True)))


def run(
    table: Table,
    parts: Sequence[nn.Module],
    microbatches: Sequence[Pair],
    loss_of: LossOf,
    count: Callable[[Any], int],
) -> ClockRun:
    """One step by the clock: forward and backward of every microbatch through all parts.

    Leaves the gradient of the mean loss, equal to the bit to ``accumulate`` of the whole model, as long as the schedule
    adds gradients in the order of microbatches (all ``schedule.orders`` do) and no two parts share a parameter.

    Args:
        parts: one module per stage; stage s makes the input of stage s + 1.
        loss_of: the *sum* of a microbatch's losses, from the last part's output and the target.
        count: how many terms that sum has, from the target.

    Raises:
        ValueError: a table of another number of stages or microbatches; one in which a pass is missing, doubled or too
            early; microbatches in which nothing has a loss.
    """
    total, last = total_count(microbatches, count), len(parts) - 1
    _check_table(table, len(parts), len(microbatches))
    mail: dict[Value, Tensor] = {}  # what lies between two ticks
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output of a stage, from F until B or W
    losses: dict[int, Tensor] = {}

    def forward(stage: int, m: int, made: dict[Value, Tensor]) -> None:
        x, target = microbatches[m]
        if stage:
            x = receive(mail.pop(Value("F", stage - 1, m)))
        y = parts[stage](x)
        if stage == last:
            y = loss_of(y, target)
            losses[m] = y.detach()
        else:
            made[Value("F", stage, m)] = y.detach()
        held[stage, m] = x, y

    def backward(kind: Kind, stage: int, m: int, made: dict[Value, Tensor]) -> None:
        x, y = held[stage, m]
        gradient = torch.full_like(y, 1 / total) if stage == last else mail[Value("B", stage + 1, m)]
        weights = [p for p in parts[stage].parameters() if p.requires_grad]
        if kind is Kind.BACKWARD and y.requires_grad:
            y.backward(gradient)
        elif kind is Kind.INPUT and x.requires_grad:
            y.backward(gradient, retain_graph=True, inputs=[x])
        elif kind is Kind.WEIGHT and weights:
            y.backward(gradient, inputs=weights)
        if kind is not Kind.WEIGHT and stage:
            assert x.grad is not None
            made[Value("B", stage, m)] = x.grad
        if kind is not Kind.INPUT:
            del held[stage, m]
            mail.pop(Value("B", stage + 1, m), None)

    log, numbers = [], [0] * len(table[0])
    for row in table:
        made: dict[Value, Tensor] = {}
        freed = list(numbers)
        for rank, action in enumerate(row):
            if action is None:
                continue
            if action.kind is Kind.FORWARD:
                forward(action.stage, action.microbatch, made)
            else:
                backward(action.kind, action.stage, action.microbatch, made)
            numbers[rank] += max(0, activations(action))  # held from the start of F
            freed[rank] = numbers[rank] + min(0, activations(action))  # to the end of B or W
        mail |= made
        log.append(Tick(row, tuple(numbers)))
        numbers = freed
    return ClockRun(tuple(losses[m] for m in range(len(microbatches))), tuple(log))


def _check_table(table: Table, num_stages: int, num_microbatches: int) -> None:
    """Its columns are a schedule that ``check`` passes, and each pass comes in a tick after those that it needs."""
    columns = zip(*table, strict=True)
    schedule = tuple(tuple(action for action in column if action is not None) for column in columns)
    check(schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    there: set[Value | None] = set()
    for tick, row in enumerate(table):
        for action in filter(None, row):
            for way, stage, _ in _lacks(action, there, num_stages):
                name = "the activation" if way == "F" else "the input's gradient"
                raise ValueError(
                    f"'{action}' in tick {tick} comes too early: {name} of stage {stage} is not there; put it in "
                    f"a tick after the one that makes it"
                )
        there |= {makes(action) for action in row if action is not None}
