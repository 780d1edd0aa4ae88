"""The course of a run in little memory, however long it is: what is shown at its end.

values of steps   0 1 2 3 4 5 6 7   full: every other one goes   0 2 4 6 8 10 ...   again: 0 4 8 12 ...
"""

import statistics
from collections.abc import Mapping
from typing import Any

MOST = 1024
"""Values that are kept of a long run."""


class Thinned:
    """Every value of a short run, and evenly spread ones of a longer one."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every, self._count = 1, 0

    def add(self, value: float) -> None:
        if self._count % self._every == 0:
            self.values.append(value)
        self._count += 1
        if len(self.values) > MOST:
            self.values, self._every = self.values[::2], 2 * self._every


class Course:
    """The first line of metrics and the last, and how loss and speed went; with ``all_lines`` every line too."""

    def __init__(self, *, all_lines: bool) -> None:
        self.first: Mapping[str, Any] = {}
        self.last: Mapping[str, Any] = {}
        self.losses, self._rates = Thinned(), Thinned()
        self.steps = 0
        self.lines: list[Mapping[str, Any]] | None = [] if all_lines else None

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds the line of a finished step."""
        self.first, self.last, self.steps = self.first or line, line, self.steps + 1
        self.losses.add(line["loss"])
        self._rates.add(line["tokens"] / line["seconds"])
        if self.lines is not None:
            self.lines.append(line)

    @property
    def rate(self) -> float:
        """Tokens per second, the median over steps."""
        return statistics.median(self._rates.values)
