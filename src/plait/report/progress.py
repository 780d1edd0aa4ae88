"""What a run shows while it is training: a line every few steps, and on a terminal a bar below them.

    step 30/60  loss   2.6693  grad norm   0.329       3301 tokens/s     19 s left
    step 40/60  loss   2.6512  grad norm   0.298       3350 tokens/s     13 s left
    ━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━  41/60  loss 2.6498  3,351 tokens/s  412.50 MiB  0:00:12 left

A pipe or a file gets only the lines.
"""

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from plait.report.training import human

RECENT = 20
"""Steps whose median time is taken for the speed."""


class ProgressView:
    """Shows the steps of a run as they are done; entered and left like a file.

    Args:
        steps: the number of the last step; ``first`` is that of the first (from 1).
        log_every: steps between two lines; the first and the last step have one too, and every evaluation.
        unit: what is counted, as in "tokens".
    """

    def __init__(self, console: Console, first: int, steps: int, log_every: int, unit: str) -> None:
        self._console, self._first, self._steps = console, first, steps
        self._log_every, self._unit = log_every, unit
        self._seconds: deque[float] = deque(maxlen=RECENT)
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
        """A step is done: its line of metrics, with ``step``, ``loss``, ``tokens``, ``seconds``, ``peak_memory``."""
        self._seconds.append(line["seconds"])
        step, steps, loss, norm = line["step"], self._steps, line["loss"], line["grad_norm"]
        typical = median(self._seconds)
        rate, left = line["tokens"] / typical, typical * (steps - step)
        if step in (self._first, steps) or step % self._log_every == 0:
            clipped = "" if norm is None else f"  grad norm {norm:7.3f}"
            self._console.print(
                f"step {step:{len(str(steps))}d}/{steps}  loss {loss:8.4f}{clipped}  {rate:9.0f} {self._unit}/s  "
                f"{left:5.0f} s left"
            )
        if not line.get("made", True):
            self._console.print(f"step {step}: skipped, gradients not finite; loss scale now {line['loss_scale']:g}")
        if "eval_loss" in line:
            self._console.print(f"step {step}: held-out loss {line['eval_loss']:.4f} ({line['eval_tokens']:,} tokens)")
        if self._bar is not None:
            speed, memory = f"{rate:,.0f} {self._unit}/s", human(line["peak_memory"])
            words = f"loss {loss:.4f}  {speed}  {memory}  {timedelta(seconds=round(left))} left"
            self._bar.update(self._task, completed=step, words=words)
