"""Shows a training run: lines, on a terminal a bar below them, and at its end a table of bytes.

    step 30/60  loss   2.6693  grad norm   0.329       3301 tokens/s     19 s left
    step 40/60  loss   2.6512  grad norm   0.298       3350 tokens/s     13 s left
    ━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━  41/60  loss 2.6498  3,351 tokens/s  412.50 MiB  0:00:12 left

A pipe or a file gets only the lines.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from plait.messages.wording import human
from plait.predict.memory import Held
from plait.run.report.screen import empty_table


class ProgressView:
    """Shows the finished steps of a run, from number ``first`` to ``steps``.  A context manager, like a file.  Each
    ``log_every``-th step has a line, and so have the first, the last, and every evaluation."""

    def __init__(self, console: Console, first: int, steps: int, log_every: int, unit: str) -> None:
        self._console, self._first, self._steps = console, first, steps
        self._log_every, self._unit = log_every, unit
        self._seconds: deque[float] = deque(maxlen=20)  # seconds of the last steps, whose median is the speed
        self._bar: Progress | None = None
        if console.is_terminal and not console.quiet:
            columns = ("{task.completed}/{task.total}", "{task.fields[words]}")
            self._bar = Progress(BarColumn(), *map(TextColumn, columns), console=console, transient=True)
            self._task = self._bar.add_task("", total=steps, completed=first - 1, words="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, line: Mapping[str, Any]) -> None:
        """Shows a finished step's metrics: ``step``, ``loss``, ``tokens``, ``seconds`` and ``peak_memory``."""
        self._seconds.append(line["seconds"])
        step, steps, loss, norm = line["step"], self._steps, line["loss"], line["grad_norm"]
        typical = median(self._seconds)
        rate, left = line["tokens"] / typical, typical * (steps - step)
        due = step in (self._first, steps) or step % self._log_every == 0
        if self._bar is not None:  # before the lines, which redraw it below them
            speed, memory = f"{rate:,.0f} {self._unit}/s", human(line["peak_memory"])
            words = f"loss {loss:.4f}  {speed}  {memory}  {timedelta(seconds=round(left))} left"
            self._bar.update(self._task, completed=step, words=words, refresh=due or "eval_loss" in line)
        if due:
            clipped = "" if norm is None else f"  grad norm {norm:7.3f}"
            self._console.print(
                f"step {step:{len(str(steps))}d}/{steps}  loss {loss:8.4f}{clipped}  {rate:9.0f} {self._unit}/s  "
                f"{left:5.0f} s left"
            )
        if not line.get("made", True):
            scale = f"; loss scale now {line['loss_scale']:g}" if "loss_scale" in line else ""
            self._console.print(f"step {step}: skipped, loss or gradients not finite{scale}")
        if "eval_loss" in line:
            self._console.print(f"step {step}: held-out loss {line['eval_loss']:.4f} ({line['eval_tokens']:,} tokens)")


@dataclass(frozen=True)
class RankBytes:
    """One rank's bytes, held between steps and sent per step, as predicted and as measured."""

    rank: int
    predicted: Held
    measured: Held
    sent_predicted: int
    sent_measured: int
    crossing_predicted: int
    """Bytes sent over axes that cross hosts."""
    crossing_measured: int
    gathered_peak: int
    """Peak bytes of gathered parameters, in addition to the bytes held."""


def bytes_table(ranks: Sequence[RankBytes]) -> Table:
    """A table of predicted and measured bytes, by kind of state.  Ranks with the same numbers share lines."""
    table = empty_table("bytes per rank", "rank", "", "predicted", "measured", "agree", left=("rank", ""))
    groups: dict[RankBytes, list[int]] = {}
    for r in ranks:
        groups.setdefault(replace(r, rank=0), []).append(r.rank)
    for r, members in groups.items():
        who = ", ".join(map(str, members)) if len(members) < 5 else f"{members[0]} .. {members[-1]} ({len(members)})"
        for name, predicted, measured in (
            ("held: parameters", r.predicted.params, r.measured.params),
            ("held: gradients", r.predicted.grads, r.measured.grads),
            ("held: optimizer state", r.predicted.optimizer, r.measured.optimizer),
            ("sent per step", r.sent_predicted, r.sent_measured),
            ("of that across hosts", r.crossing_predicted, r.crossing_measured),
        ):
            if name.startswith("of that") and not predicted and not measured:
                continue
            agree = "to the byte" if predicted == measured else f"{measured - predicted:+,} B"
            table.add_row(who, name, human(predicted), human(measured), agree)
            who = ""
        if r.gathered_peak:
            table.add_row("", "gathered at most", "", human(r.gathered_peak), "")
    return table
