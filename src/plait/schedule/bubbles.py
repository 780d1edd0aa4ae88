"""Bubbles and activations in closed form, for p equal ranks, m microbatches and instant messages.

F, I, W are the times of one stage, B = I + W, and v the stages on each rank.  Between its first and last pass rank r
waits

    naive            (m p - m - r) (F + B)       so rank 0's idle share is 1 - 1/p
    gpipe, 1f1b      (p-1-r) (F + B)             (p-1) / (m + p-1)
    interleaved      (p-1-r) (F + B)             (p-1) / (v m + p-1), if p divides m
    zb_h1            (p-1-r) (F + B - 2W)        from m = p, if W <= F
    zb_h2            (p-1-r) (F + B - 3W)        from m = 2p - 1, if W <= F and 3W <= F + B
    zbv              0                           from m = 2p, if F = I = W
    dualpipe_v       (p-1-r) (F + B - 2W)        from m = 2p, if W <= I <= F <= B

Rank 0 starts first; its waits are called the bubble.  Peaks are simultaneous activations, counted in stages from F
until B or W.  The last line is not published: the simulator found it.  Tests compare all of them with the simulator.

Sources: the tables of Huang et al. 2019, Narayanan et al. 2021, Qi et al. 2023 and 2024.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.schedule.actions import check_sizes


@dataclass(frozen=True)
class Bubbles:
    """The waits and peaks of one order, per rank; None if the formulas do not hold."""

    waits: tuple[float, ...] | None = None
    idle_share: float | None = None
    """Rank 0's waits as a share of its waits and work."""
    peaks: tuple[int, ...] | None = None


class EqualRanks(NamedTuple):
    """The arguments of the formulas, in the letters of the table above."""

    p: int
    m: int
    v: int
    F: float
    I: float  # noqa: E741
    W: float
    B: float

    @property
    def after(self) -> range:
        """p - 1 - r for each rank."""
        return range(self.p - 1, -1, -1)

    def waits(self, weights: int = 0) -> list[float]:
        """(p-1-r) (F + B - W times ``weights``) for each rank."""
        return [k * (self.F + self.B - weights * self.W) for k in self.after]


Formula = Callable[[EqualRanks], tuple[Sequence[float] | None, Sequence[float] | None]]
"""The waits and peaks of each rank; None if they have no closed form."""


def where(holds: bool, values: list[float]) -> list[float] | None:
    """Returns the values if the condition of their formula holds."""
    return values if holds else None


FORMULAS: dict[str, Formula] = {
    "naive": lambda c: ([(c.m * c.p - c.m - r) * (c.F + c.B) for r in range(c.p)], [1] * c.p),
    "gpipe": lambda c: (c.waits(), [c.m] * c.p),
    "1f1b": lambda c: (c.waits(), [min(c.m, k + 1) for k in c.after]),
    "interleaved": lambda c: (
        where(c.m % c.p == 0, c.waits()),
        where(c.m % c.p == 0, [min(c.v * c.m, 2 * k + (c.v - 1) * c.p + 1) for k in c.after]),
    ),
    "zb_h1": lambda c: (where(c.m >= c.p and c.W <= c.F, c.waits(2)), [min(c.m, c.p)] * c.p),
    "zb_h2": lambda c: (
        where(c.m >= 2 * c.p - 1 and c.W <= c.F and 3 * c.W <= c.F + c.B, c.waits(3)),
        [min(c.m, 2 * c.p - 1)] * c.p,
    ),
    "zbv": lambda c: (
        where(c.m >= 2 * c.p and c.F == c.I == c.W, [0.0] * c.p),
        where(c.m >= 2 * c.p - 1, [2 * c.p] * c.p),
    ),
    "dualpipe_v": lambda c: (
        where(c.m >= 2 * c.p and c.W <= c.I <= c.F <= c.B, c.waits(2)),
        where(c.m >= 2 * c.p, [2 * c.p + 1] * c.p),
    ),
}
"""The waits and peaks of the orders that have closed forms."""


def bubbles(
    formula: Formula | None, num_stages: int, num_microbatches: int, chunks: int, forward: float, input: float,
    weight: float,
) -> Bubbles:  # fmt: skip
    """Returns the closed forms of an order, by the formula in its row of ``ORDERS``.  ``chunks`` are the stages on each
    rank; ``forward``, ``input`` and ``weight`` are the times of one *stage*, as in ``Costs``."""
    check_sizes(num_stages, num_microbatches)
    if formula is None or num_stages % chunks:
        return Bubbles()  # no formula, or the last ranks have less to do
    equal = EqualRanks(num_stages // chunks, num_microbatches, chunks, forward, input, weight, input + weight)
    waits, peaks = formula(equal)
    busy = num_microbatches * chunks * (equal.F + equal.B)
    share = None if waits is None or not waits[0] + busy else waits[0] / (waits[0] + busy)
    return Bubbles(None if waits is None else tuple(waits), share, None if peaks is None else tuple(map(int, peaks)))
