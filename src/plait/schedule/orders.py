"""Orders of work: small pure functions that write schedules.

No pipeline is one stage: a plain data-parallel run is ``one_stage``, on every rank alike.  A pipeline's order has one
line per rank.  Most of them are one idea with other numbers: in tick t a rank does the forward of microbatch t, the
backward of microbatch t - lag, and where that is split, the weight part of microbatch t - another lag.

    rank r of p     lag of backward       lag of weights     what it buys
    naive           0                                        one activation in flight
    gpipe           m - 1                                    the shortest bubble without more chunks
    1f1b            p - 1 - r                                the same bubble, p - r activations instead of m
    zb_h1           p - 1 - r             p - 1              weights fill the bubble, memory as 1f1b's first rank
    zb_h2           2 (p - 1 - r)         2 (p - 1)          no bubble for twice the memory

    1f1b, p = 3, m = 4          tick  0      1      2      3      4      5
    rank 0                            F0     F1     F2 B0  F3 B1     B2     B3
    rank 1                            F0     F1 B0  F2 B1  F3 B2     B3
    rank 2                            F0 B0  F1 B1  F2 B2  F3 B3

``interleaved`` is the same with v stages per rank, in rounds of p microbatches.  The V-shaped orders are in
``orders_v.py``.  Backwards are always in the order of microbatches, so gradients are added in that order.

Uneven sizes need no special case.  An action depends only on others of its own microbatch and of neighbouring stages.
So whole microbatches, and the last stages, may be struck out of a valid schedule, and the rest is valid: write the
even schedule that is large enough, and ``keep`` what there is.

Sources: GPipe (Huang et al. 2019), PipeDream-flush / 1F1B and its interleaving (Narayanan et al. 2021),
zero bubble (Qi et al. 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass

from plait.messages.wording import did_you_mean
from plait.schedule import bubbles
from plait.schedule.actions import Action, Kind, Line, Schedule, check_sizes, check_written, count_microbatches, keep
from plait.schedule.orders_v import dualpipe_v, zbv

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def one_stage(num_microbatches: int, num_ranks: int = 1) -> Schedule:
    """Forward and backward of each microbatch in turn, then one reduction and one update."""
    check_sizes(1, num_microbatches)
    passes = [Action(kind, 0, m) for m in range(num_microbatches) for kind in (F, B)]
    line = (*passes, Action(Kind.REDUCE, 0), Action(Kind.UPDATE, 0))
    return (line,) * num_ranks


def forwards(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The forwards of a schedule alone, for an evaluation of any number of microbatches.

    A schedule may follow itself, and forwards need nothing but forwards: what was valid stays valid.  So one that was
    written for fewer microbatches is repeated, and what is too many of it struck out.
    """
    check_sizes(1, num_microbatches)
    size = count_microbatches(schedule)
    return tuple(
        tuple(
            Action(F, action.stage, action.microbatch + start)
            for start in range(0, num_microbatches, size)
            for action in line
            if action.kind is F and action.microbatch + start < num_microbatches
        )
        for line in schedule
    )


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """One microbatch after another through all stages and back: one rank works, the others wait."""
    check_sizes(num_stages, num_microbatches)
    return tuple(_ticks(num_microbatches, (F, s, 0), (B, s, 0)) for s in range(num_stages))


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    check_sizes(num_stages, num_microbatches)
    last = num_microbatches - 1
    return tuple(_ticks(num_microbatches, (F, s, 0), (B, s, last)) for s in range(num_stages))


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """A backward as soon as there is one: the number of activations in flight no longer grows with microbatches."""
    check_sizes(num_stages, num_microbatches)
    lag = [num_stages - 1 - s for s in range(num_stages)]
    return tuple(_ticks(num_microbatches, (F, s, 0), (B, s, lag[s])) for s in range(num_stages))


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with weight parts put off until p activations are in flight, on every rank; they fill the bubbles."""
    check_sizes(num_stages, num_microbatches)
    p = num_stages
    return tuple(_ticks(num_microbatches, (F, s, 0), (I, s, p - 1 - s), (W, s, p - 1)) for s in range(p))


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Twice the forwards before the first backward: with equal parts no rank waits between its first and last pass."""
    check_sizes(num_stages, num_microbatches)
    p = num_stages
    return tuple(_ticks(num_microbatches, (F, s, 0), (I, s, 2 * (p - 1 - s)), (W, s, 2 * (p - 1))) for s in range(p))


def interleaved(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with ``chunks`` stages on each rank, stage s on rank s mod p: the bubble shrinks by that factor.

    A rank takes p microbatches through its first stage, the same p through its second, and so on; backwards likewise.
    Where p does not divide the microbatches, the last round is not full.
    """
    check_sizes(num_stages, num_microbatches)
    v = stages_per_rank("interleaved", chunks)
    p = -(-num_stages // v)
    rounds = -(-num_microbatches // p)
    lines = []
    for r in range(p):
        forwards, backwards = [], []
        for start in range(0, rounds * p, p):
            for chunk in range(v):
                for m in range(start, start + p):
                    forwards.append(Action(F, chunk * p + r, m))
                    backwards.append(Action(B, (v - 1 - chunk) * p + r, m))
        lag = 2 * (p - 1 - r) + (v - 1) * p
        line: list[Action] = []
        for tick in range(len(forwards) + lag):
            line += forwards[tick : tick + 1]
            if tick >= lag:
                line.append(backwards[tick - lag])
        lines.append(tuple(line))
    return keep(tuple(lines), num_stages, num_microbatches)


def _ticks(num_microbatches: int, *lanes: tuple[Kind, int, int]) -> Line:
    """In tick t each lane (kind, stage, lag) does microbatch t - lag, if there is one."""
    ticks = num_microbatches + max(lag for _, _, lag in lanes)
    return tuple(
        Action(kind, stage, tick - lag)
        for tick in range(ticks)
        for kind, stage, lag in lanes
        if 0 <= tick - lag < num_microbatches
    )


# ---- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """An order, and what is special about it."""

    write: Callable[..., Schedule]
    """From the numbers of stages and microbatches; and, where they may be chosen, the stages on each rank."""
    summary: str
    stages_per_rank: int = 1
    """The default where ``takes_chunks``."""
    takes_chunks: bool = False
    """Whether a user may choose the number of stages on each rank, from 2."""
    formula: bubbles.Formula | None = None
    """Its bubbles and activations in closed form, if it has any."""


ORDERS: dict[str, Order] = {
    "naive": Order(naive, "one rank works, the others wait", formula=bubbles.naive),
    "gpipe": Order(gpipe, "all forwards, then all backwards", formula=bubbles.gpipe),
    "1f1b": Order(one_f_one_b, "a backward as soon as there is one", formula=bubbles.one_f_one_b),
    "interleaved": Order(interleaved, "1f1b with several stages on each rank", 2, True, bubbles.interleaved),
    "zb_h1": Order(zb_h1, "weight parts fill the bubbles, in 1f1b's memory", formula=bubbles.zb_h1),
    "zb_h2": Order(zb_h2, "no bubble, for twice the memory", formula=bubbles.zb_h2),
    "zbv": Order(zbv, "no bubble, in 1f1b's memory, on a V", 2, formula=bubbles.zbv),
    "dualpipe_v": Order(dualpipe_v, "forwards beside backwards, on a V", 2, formula=bubbles.dualpipe_v),
}
"""Every order of a pipeline.  A new one is a function and a row."""


def find_order(name: str) -> Order:
    """The row of an order; a ValueError with the nearest names where there is none."""
    if name not in ORDERS:
        hint = did_you_mean(name, ORDERS)
        raise ValueError(f"unknown order {name!r}: {hint}{' ' * bool(hint)}the orders are {', '.join(ORDERS)}")
    return ORDERS[name]


def write_order(name: str, num_stages: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """An order by name; a ValueError if there is none, or for chunks where the order fixes them."""
    check_written(num_stages, num_microbatches)
    order, per_rank = find_order(name), stages_per_rank(name, chunks)
    return order.write(num_stages, num_microbatches, *[per_rank] * order.takes_chunks)


def stages_per_rank(name: str, chunks: int | None = None) -> int:
    """How many stages a rank has; ``chunks`` is for orders that let one choose."""
    order = find_order(name)
    if chunks is None:
        return order.stages_per_rank
    if not order.takes_chunks:
        raise ValueError(
            f"{chunks} chunks: {name} decides how many stages a rank has; only {chunked_orders()} takes chunks"
        )
    if chunks < 2:
        raise ValueError(f"{name} with {chunks} stages per rank: give chunks from 2 (1f1b has one)")
    return chunks


# ---- for help texts and refusals --------------------------------------------------------------------------


def describe_orders() -> str:
    """The orders, each with its summary."""
    return "; ".join(f"{name}: {order.summary}" for name, order in ORDERS.items())


def describe_chunks() -> str:
    """What ``chunks`` is, and for which orders."""
    defaults = (
        f"{name} ({order.stages_per_rank} unless given)" for name, order in ORDERS.items() if order.takes_chunks
    )
    return f"Stages on each rank, for {', '.join(defaults)}; the other orders decide it themselves."


def chunked_orders() -> str:
    """The orders that let one choose the number of stages on each rank."""
    return ", ".join(name for name, order in ORDERS.items() if order.takes_chunks)
