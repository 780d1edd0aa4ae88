"""Bubbles and activations in closed form, for p equal ranks, m microbatches and messages that take no time.

F, I, W are the times of one stage, B = I + W, and v the stages on each rank.  Between its first and last pass rank r
waits

    naive            (m p - m - r) (F + B)       so rank 0's idle share is 1 - 1/p
    gpipe, 1f1b      (p-1-r) (F + B)             (p-1) / (m + p-1)
    interleaved      (p-1-r) (F + B)             (p-1) / (v m + p-1), where p divides m
    zb_h1            (p-1-r) (F + B - 2W)        from m = p, where W <= F
    zb_h2            (p-1-r) (F + B - 3W)        from m = 2p - 1, where W <= F and 3W <= F + B
    zbv              0                           from m = 2p, where F = I = W
    dualpipe_v       (p-1-r) (F + B - 2W)        from m = 2p, where W <= I <= F <= B

Rank 0 starts first; its waits are the bubble that one speaks of.  Peaks are activations in flight at once, counted
in stages from F until B or W (an interleaved or V-shaped rank has stages of 1/v the size).  The last line is not a
published formula: the simulator found it, and tests hold it, as they hold the others.

Sources: the tables of Huang et al. 2019, Narayanan et al. 2021, Qi et al. 2023 and 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.actions import check_sizes


@dataclass(frozen=True)
class Bubbles:
    """What the formulas say of one order; None where they say nothing."""

    waits: tuple[float, ...] | None
    """Per rank, in the unit of the times that were given."""
    idle_share: float | None
    """Rank 0's waits over its waits and work."""
    peaks: tuple[int, ...] | None
    """Per rank, in stages."""


def bubbles(
    name: str, num_stages: int, num_microbatches: int, chunks: int, forward: float, input: float, weight: float
) -> Bubbles:
    """The closed forms of an order; the times are those of one *stage*, as in ``Costs``."""
    check_sizes(num_stages, num_microbatches)
    F, I, W = forward, input, weight  # noqa: E741
    B, m, v = I + W, num_microbatches, chunks
    p = -(-num_stages // v)
    equal = F == I == W
    if num_stages != p * v:
        return Bubbles(None, None, None)  # the last ranks have less to do
    steps: list[float] | None = None  # waits, one number per rank
    peaks: tuple[int, ...] | None = None
    behind = [p - 1 - r for r in range(p)]
    if name == "naive":
        steps, peaks = [(m * p - m - r) * (F + B) for r in range(p)], (1,) * p
    elif name in ("gpipe", "1f1b"):
        steps = [k * (F + B) for k in behind]
        peaks = (m,) * p if name == "gpipe" else tuple(min(m, k + 1) for k in behind)
    elif name == "interleaved":
        if m % p == 0:
            steps = [k * (F + B) for k in behind]
            peaks = tuple(min(v * m, 2 * k + (v - 1) * p + 1) for k in behind)
    elif name == "zb_h1":
        if m >= p and W <= F:
            steps = [k * (F + B - 2 * W) for k in behind]
        peaks = (min(m, p),) * p
    elif name == "zb_h2":
        if m >= 2 * p - 1 and W <= F and 3 * W <= F + B:
            steps = [k * (F + B - 3 * W) for k in behind]
        peaks = (min(m, 2 * p - 1),) * p
    elif name == "zbv":
        if m >= 2 * p and equal:
            steps = [0.0] * p
        peaks = (2 * p,) * p if m >= 2 * p - 1 else None
    elif name == "dualpipe_v":
        if m >= 2 * p and W <= I <= F <= B:
            steps = [k * (F + B - 2 * W) for k in behind]
        peaks = (2 * p + 1,) * p if m >= 2 * p else None
    if steps is None:
        return Bubbles(None, None, peaks)
    share = steps[0] / (steps[0] + m * v * (F + B))
    return Bubbles(tuple(steps), share, peaks)
