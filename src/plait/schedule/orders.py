"""Orders of work: rows of a table that write schedules.

A run without a pipeline has one stage and the order ``one_stage``, the same on every rank.  A pipeline's order has one
line per rank.  Most orders are one idea with different numbers: in tick t a rank does the forward of microbatch t,
the backward of microbatch t - lag, and, if backwards are split, the weight part of microbatch t - another lag.

    rank r of p     lag of backward       lag of weights     advantage
    naive           0                                        one activation in flight
    gpipe           m - 1                                    the shortest bubble without more chunks
    1f1b            p - 1 - r                                the same bubble, p - r activations instead of m
    zb_h1           p - 1 - r             p - 1              weights fill the bubble, memory as 1f1b's first rank
    zb_h2           2 (p - 1 - r)         2 (p - 1)          no bubble for twice the memory

    1f1b, p = 3, m = 4          tick  0      1      2      3      4      5
    rank 0                            F0     F1     F2 B0  F3 B1     B2     B3
    rank 1                            F0     F1 B0  F2 B1  F3 B2     B3
    rank 2                            F0 B0  F1 B1  F2 B2  F3 B3

``interleaved`` is the same with v stages per rank, in rounds of p microbatches.  Two orders run on a V: rank r owns
stage r and stage 2p - 1 - r, so the last stage is where the first one is.

    stage   0  1  2                a forward goes down the left arm and up the right one,
            5  4  3                a backward comes back the same way; at the tip (rank p - 1)
    rank    0  1  2                no message is needed

The first backward starts on rank 0, where the last stage is, so every rank gets work back early and all ranks hold
equally many activations.  Their lines are phases, each a repeated pattern (0 is the rank's stage on the way down, 1 the
one on the way up); every letter takes the next microbatch of its kind.  The numbers of repetitions follow from two
facts.  A pass on the way up reaches rank r 2 (p - r) - 1 passes after the same microbatch went down; and a rank holds
at most 2p activations of its half-size stages, as much as 1F1B's first rank.

Backwards are always in the order of microbatches, so gradients are added in that order.

Uneven sizes need no special case.  An action depends only on others of its own microbatch and of neighbouring stages.
So whole microbatches, and the last stages, may be removed from a valid schedule, and it stays valid: an order writes
an even schedule that is large enough, and ``keep`` removes the surplus.

Sources: GPipe (Huang et al. 2019), PipeDream-flush / 1F1B and its interleaving (Narayanan et al. 2021), zero bubble and
controllable memory (Qi et al. 2023, 2024: ZB-H1, ZB-H2, ZB-V), DualPipe cut in half (DeepSeek 2025: DualPipeV).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from plait.messages.wording import did_you_mean
from plait.schedule.actions import Action, Kind, Line, Schedule, check_sizes, check_written, count_microbatches, keep
from plait.schedule.bubbles import FORMULAS, Formula

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
Write = Callable[..., Schedule]
"""Takes the numbers of stages and microbatches and, for some orders, the stages on each rank; returns a schedule."""


def one_stage(num_microbatches: int, num_ranks: int = 1) -> Schedule:
    """Returns forward and backward of each microbatch in turn, then one reduction and one update."""
    check_sizes(1, num_microbatches)
    passes = [Action(kind, 0, m) for m in range(num_microbatches) for kind in (F, B)]
    return ((*passes, Action(Kind.REDUCE, 0), Action(Kind.UPDATE, 0)),) * num_ranks


def forwards(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Returns only the forwards of a schedule, for an evaluation of any number of microbatches.

    A schedule may follow itself, and forwards only need forwards, so a valid schedule stays valid.  A schedule for
    fewer microbatches is repeated, and surplus microbatches are removed.
    """
    check_sizes(1, num_microbatches)
    starts = range(0, num_microbatches, count_microbatches(schedule))
    lines = [[Action(F, a.stage, a.microbatch + s) for s in starts for a in line if a.kind is F] for line in schedule]
    return tuple(tuple(a for a in line if a.microbatch < num_microbatches) for line in lines)


# ---- one stage on each rank: lags ---------------------------------------------------------------------------


def lagging(lags: Callable[[int, int, int], dict[Kind, int]]) -> Write:
    """Returns the order in which each kind of pass lags by ``lags(p, m, rank)`` ticks."""

    def write(num_stages: int, num_microbatches: int) -> Schedule:
        check_sizes(num_stages, num_microbatches)
        lines: list[Line] = []
        for s in range(num_stages):
            lag = lags(num_stages, num_microbatches, s)
            ticks = range(num_microbatches + max(lag.values()))
            due = ((kind, tick - late) for tick in ticks for kind, late in lag.items())
            lines.append(tuple(Action(kind, s, m) for kind, m in due if 0 <= m < num_microbatches))
        return tuple(lines)

    return write


naive = lagging(lambda p, m, r: {F: 0, B: 0})
gpipe = lagging(lambda p, m, r: {F: 0, B: m - 1})
one_f_one_b = lagging(lambda p, m, r: {F: 0, B: p - 1 - r})
zb_h1 = lagging(lambda p, m, r: {F: 0, I: p - 1 - r, W: p - 1})
zb_h2 = lagging(lambda p, m, r: {F: 0, I: 2 * (p - 1 - r), W: 2 * (p - 1)})


# ---- several stages on each rank ----------------------------------------------------------------------------


def interleaved(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Returns 1F1B with ``chunks`` stages on each rank, stage s on rank s mod p: the bubble shrinks by that factor.

    A rank takes p microbatches through its first stage, the same p through its second, and so on; backwards likewise.
    If p does not divide the microbatches, the last round is not full.
    """
    check_sizes(num_stages, num_microbatches)
    v = stages_per_rank("interleaved", chunks)
    p = -(-num_stages // v)
    turns = [(c, m) for start in range(0, num_microbatches, p) for c in range(v) for m in range(start, start + p)]
    lines = []
    for r in range(p):
        lag = 2 * (p - 1 - r) + (v - 1) * p
        line: list[Action] = []
        for tick in range(len(turns) + lag):
            line += [Action(F, c * p + r, m) for c, m in turns[tick : tick + 1]]
            line += [Action(B, (v - 1 - c) * p + r, m) for c, m in turns[tick - lag :][:1] if tick >= lag]
        lines.append(tuple(line))
    return keep(tuple(lines), num_stages, num_microbatches)


def on_a_v(phases: Callable[[int, int, int], list[tuple[str, int]]]) -> Write:
    """Returns the order of these phases, (pattern, times) for p, m and the rank.  They need 2p microbatches."""

    def write(num_stages: int, num_microbatches: int) -> Schedule:
        check_sizes(num_stages, num_microbatches)
        p = -(-num_stages // 2)
        m = max(num_microbatches, 2 * p)
        lines = tuple(_phases(phases(p, m, r), r, 2 * p - 1 - r) for r in range(p))
        return keep(lines, num_stages, num_microbatches)

    return write


def _phases(phases: list[tuple[str, int]], down: int, up: int) -> Line:
    """Writes the patterns out.  ``F0`` is the next forward of stage ``down``, ``I1`` the next input part of ``up``;
    ``B`` is a full backward, and ``W`` the weight part that has waited longest."""
    stages = {"0": down, "1": up}
    forwards, backwards = ({"0": count(), "1": count()} for _ in "FB")
    waiting: deque[tuple[int, int]] = deque()
    line = []
    for word in (word for pattern, times in phases for word in pattern.split() * times):
        kind = Kind(word[0])
        if kind is W:
            stage, microbatch = waiting.popleft()
        else:
            stage = stages[word[1]]
            microbatch = next((forwards if kind is F else backwards)[word[1]])
        if kind is I:
            waiting.append((stage, microbatch))
        line.append(Action(kind, stage, microbatch))
    assert not waiting
    return tuple(line)


def _zbv(p: int, m: int, r: int) -> list[tuple[str, int]]:
    return [
        ("F0", 2 * (p - r) - 1),  # until the first microbatch is back on the way up
        ("F1 F0", r),  # until it is back from the last stage; now 2p - 1 activations are held
        ("F1 I1 W1", p - r),  # each weight part makes room for one forward
        ("F0 I0 W0 F1 I1 W1", m - 2 * p + r + 1),  # steady
        ("I0 W0 F1 I1 W1", p - r - 1),  # no forwards left on the way down
        ("I0 I1", r),  # others wait for these: weight parts are delayed
        ("I0 W", p - r),
        ("W", 2 * r),
    ]


def _dualpipe_v(p: int, m: int, r: int) -> list[tuple[str, int]]:
    """Writes DualPipeV.  A pair is a forward and the full backward after it in the line.  Backwards are split only
    where ranks would wait: while the pipeline fills and while it drains."""
    drain = "B1 B0 " * (r + 1)
    return [
        ("F0", 2 * (p - r - 1)),
        ("F0 F1", r + 1),
        ("I1 W1 F1", p - r - 1),
        ("F0 B1 F1 B0", m - 2 * p + r + 1),  # pairs of both directions
        ("B1 F1 B0", p - r - 1),
        (" ".join([*drain.split()[: r + 1], *drain.replace("B", "I").split()[r + 1 :]]), 1),
        ("W I0", p - r - 1),
        ("W", r + 1),
    ]


zbv, dualpipe_v = on_a_v(_zbv), on_a_v(_dualpipe_v)


# ---- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """An order and its properties."""

    write: Write
    summary: str
    stages_per_rank: int = 1
    """The default for orders that take chunks."""
    takes_chunks: bool = False
    """True if a user may choose the number of stages on each rank, from 2."""
    formula: Formula | None = None
    """Its bubbles and activations in closed form, if it has any."""


ORDERS: dict[str, Order] = {
    "naive": Order(naive, "one rank works, the others wait", formula=FORMULAS["naive"]),
    "gpipe": Order(gpipe, "all forwards, then all backwards", formula=FORMULAS["gpipe"]),
    "1f1b": Order(one_f_one_b, "a backward as soon as there is one", formula=FORMULAS["1f1b"]),
    "interleaved": Order(interleaved, "1f1b with several stages on each rank", 2, True, FORMULAS["interleaved"]),
    "zb_h1": Order(zb_h1, "weight parts fill the bubbles, in 1f1b's memory", formula=FORMULAS["zb_h1"]),
    "zb_h2": Order(zb_h2, "no bubble, for twice the memory", formula=FORMULAS["zb_h2"]),
    "zbv": Order(zbv, "no bubble, in 1f1b's memory, on a V", 2, formula=FORMULAS["zbv"]),
    "dualpipe_v": Order(dualpipe_v, "forwards next to backwards, on a V", 2, formula=FORMULAS["dualpipe_v"]),
}
"""All orders of a pipeline.  A new one is a function and a row."""


def find_order(name: str) -> Order:
    """Returns the row of an order; raises ValueError with the nearest names if there is none."""
    if name not in ORDERS:
        hint = did_you_mean(name, ORDERS)
        raise ValueError(f"unknown order {name!r}: {hint}{' ' * bool(hint)}the orders are {', '.join(ORDERS)}")
    return ORDERS[name]


def write_order(name: str, num_stages: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """Writes an order by name; raises ValueError if there is none, or if it takes no chunks."""
    check_written(num_stages, num_microbatches)
    order, per_rank = find_order(name), stages_per_rank(name, chunks)
    return order.write(num_stages, num_microbatches, *[per_rank] * order.takes_chunks)


def stages_per_rank(name: str, chunks: int | None = None) -> int:
    """The number of stages on a rank; ``chunks`` is for orders that take it."""
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
    """Lists the orders, each with its summary."""
    return "; ".join(f"{name}: {order.summary}" for name, order in ORDERS.items())


def describe_chunks() -> str:
    """Describes ``chunks``, and the orders that take it."""
    defaults = [f"{n} ({order.stages_per_rank} unless given)" for n, order in ORDERS.items() if order.takes_chunks]
    return f"Stages on each rank, for {', '.join(defaults)}; the other orders decide it themselves."


def chunked_orders() -> str:
    """The orders whose number of stages on each rank can be chosen."""
    return ", ".join(name for name, order in ORDERS.items() if order.takes_chunks)
