"""Finds slow ranks: a rank whose steps take longer to compute than those of its peers, step by step.

Waiting hides slow ranks: all ranks of a run need the same time for a step, and the fast ones wait in it.  The
difference is in the time that a rank did *not* wait.  A rank is compared with the ranks of the same pipe coordinate,
since stages may differ in size, in each of the last steps that all of them finished:

    ratio of a step  =  seconds computed / median of the others' seconds

It is a straggler if the median of its ratios is at least ``SLOW`` and nearly all of them are above ``ABOVE``: machines
are noisy, and one long step (a checkpoint, an evaluation) proves nothing.  Neither do many short ones in a row: a rank
that had to share its core for a moment is not slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from plait.run.watch.page import Status
from plait.table.mesh import Mesh

WINDOW, SPAN = 16, 2.0
"""The least number of steps to compare, and the seconds that they span: no step counts for more than its share."""
SLOW, ABOVE, MOST_BELOW = 1.5, 1.35, 1 / 8
"""The median ratio of a straggler; the ratio that all but this share of its ratios exceed."""


def stragglers(statuses: Sequence[Status], mesh: Mesh) -> list[tuple[int, str]]:
    """Finds the slow ranks, each with a text: ``computes 2.0 times as long ...``.  A rank is checked once it and its
    peers have finished ``WINDOW`` steps, or more if these do not span ``SPAN`` seconds."""
    found = list[tuple[int, str]]()
    for peers in mesh.groups(("replica", "shard", "tensor")):
        group = [s for s in statuses if s.rank in peers and s.finished]
        computed = _aligned(group) if len(group) > 1 else []
        for mine, status in enumerate(group if computed else ()):
            others = [median(step[:mine] + step[mine + 1 :]) for step in computed]
            own = [step[mine] for step in computed]
            ratios = [a / max(1e-9, b) for a, b in zip(own, others, strict=True)]
            below = sum(ratio <= ABOVE for ratio in ratios)
            if median(ratios) >= SLOW and below <= MOST_BELOW * len(ratios):
                seconds, theirs = median(own), median(others)
                text = f"computes {seconds / max(1e-9, theirs):.1f} times as long as its peers: {seconds:.3g} s a step "
                found.append((status.rank, f"{text}against {theirs:.3g} s, over {len(own)} steps"))
    return found


def _aligned(group: Sequence[Status]) -> list[list[float]]:
    """For each of the last steps that all have finished, the seconds that each of them computed; empty if there are too
    few."""
    rows, span = list[list[float]](), 0.0
    for number in range(min(s.finished for s in group), 0, -1):
        places = [len(s.steps) - 1 - (s.finished - number) for s in group]
        if min(places) < 0:
            break
        steps = [s.steps[at] for s, at in zip(group, places, strict=True)]
        rows.append([computed for computed, _waited in steps])
        span += min(SPAN / WINDOW, max(map(sum, steps)))
        if span >= SPAN:
            return rows
    return []
