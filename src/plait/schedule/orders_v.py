"""Orders on a V: rank r owns stage r and stage 2p - 1 - r, so the last stage is where the first one is.

    stage   0  1  2                a forward goes down the left arm and up the right one,
            5  4  3                a backward comes back the same way; at the tip (rank p - 1)
    rank    0  1  2                no message is needed

The first backward starts on rank 0, where the last stage is, so every rank gets work back early and the ranks hold
equally much.  Below, 0 is a rank's stage on the way down and 1 its stage on the way up.  A line is a list of phases,
each a pattern repeated; every letter takes the next microbatch of its kind.  The numbers of repetitions come from two
facts.  A pass on the way up reaches rank r 2 (p - r) - 1 passes after the same microbatch went down; and a rank holds
at most 2p activations of its half-size stages, as much as 1F1B's first rank.

The patterns need 2p microbatches; with fewer, the others are struck out (see ``orders.py``).

Sources: zero bubble, controllable memory (Qi et al. 2023, 2024: ZB-V), DualPipe cut in half (DeepSeek 2025: DualPipeV).
"""

from collections import deque
from itertools import count

from plait.schedule.actions import Action, Kind, Line, Schedule, check_sizes, keep


def zbv(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero bubble on the V: no rank waits between its first and last pass when F = I = W, in 1F1B's memory."""
    check_sizes(num_stages, num_microbatches)
    p = -(-num_stages // 2)
    m = max(num_microbatches, 2 * p)
    lines = []
    for r in range(p):
        phases = [
            ("F0", 2 * (p - r) - 1),  # until the first microbatch is back on the way up
            ("F1 F0", r),  # until it is back from the last stage; now 2p - 1 activations are held
            ("F1 I1 W1", p - r),  # each weight part makes room for one forward
            ("F0 I0 W0 F1 I1 W1", m - 2 * p + r + 1),  # steady
            ("I0 W0 F1 I1 W1", p - r - 1),  # no forwards left on the way down
            ("I0 I1", r),  # others wait for these: weight parts are put off
            ("I0 W", p - r),
            ("W", 2 * r),
        ]
        lines.append(_line(phases, r, 2 * p - 1 - r))
    return keep(tuple(lines), num_stages, num_microbatches)


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards of one direction beside backwards of the other, in pairs whose messages and computation can overlap.

    A pair is a forward and the full backward after it in the line.  Backwards are split only where ranks would wait:
    while the pipeline fills and while it drains.
    """
    check_sizes(num_stages, num_microbatches)
    p = -(-num_stages // 2)
    m = max(num_microbatches, 2 * p)
    lines = []
    for r in range(p):
        drain = "B1 B0 " * (r + 1)
        whole, split = drain.split()[: r + 1], drain.replace("B", "I").split()[r + 1 :]
        phases = [
            ("F0", 2 * (p - r - 1)),
            ("F0 F1", r + 1),
            ("I1 W1 F1", p - r - 1),
            ("F0 B1 F1 B0", m - 2 * p + r + 1),  # pairs of both directions
            ("B1 F1 B0", p - r - 1),
            (" ".join([*whole, *split]), 1),
            ("W I0", p - r - 1),
            ("W", r + 1),
        ]
        lines.append(_line(phases, r, 2 * p - 1 - r))
    return keep(tuple(lines), num_stages, num_microbatches)


def _line(phases: list[tuple[str, int]], down: int, up: int) -> Line:
    """The patterns written out.  ``F0`` is the next forward of stage ``down``, ``I1`` the next input part of ``up``;
    ``B`` is a full backward, and ``W`` the weight part that has waited longest.
    """
    stages = {"0": down, "1": up}
    forwards, backwards = ({"0": count(), "1": count()} for _ in "FB")
    waiting: deque[tuple[int, int]] = deque()
    line = []
    for pattern, times in phases:
        for word in pattern.split() * times:
            kind = Kind(word[0])
            if kind is Kind.WEIGHT:
                stage, microbatch = waiting.popleft()
            else:
                stage = stages[word[1]]
                microbatch = next((forwards if kind is Kind.FORWARD else backwards)[word[1]])
            if kind is Kind.INPUT:
                waiting.append((stage, microbatch))
            line.append(Action(kind, stage, microbatch))
    assert not waiting
    return tuple(line)
