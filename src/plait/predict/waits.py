"""Waits of a planned step: stages wait for each other, and ranks that share cores take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.predict.cluster import Cluster
from plait.predict.plan import Plan


def slowest_path(plan: Plan, ranks: Sequence[tuple[float, float]], hop: float) -> tuple[int, float]:
    """The rank whose work and waits take longest, and their seconds.

    Under 1F1B and GPipe stages need not be equal: rank r waits until the first microbatch reaches it, and again for the
    stages after it, as far as its own passes do not fill that time (1F1B).  The other orders have formulas for equal
    ranks, with the mean of all but the slowest.

    Args:
        ranks: seconds of a forward and of a backward of a microbatch on each rank of the pipe axis.
    """
    m, last = plan.microbatches, len(ranks) - 1
    whole = [forward + backward for forward, backward in ranks]
    if plan.order not in ("1f1b", "gpipe"):
        slow = max(range(len(ranks)), key=whole.__getitem__)
        means = [(sum(one) - one[slow] * (last > 0)) / max(last, 1) for one in zip(*ranks, strict=True)]
        waits = plan.bubbles(means[0] / plan.stages_per_rank, means[1] / plan.stages_per_rank).waits
        assert waits is not None
        return slow, m * whole[slow] + max(waits) + 2 * last * hop
    paths, before, after = [], 0.0, sum(whole) + 2 * last * hop
    for rank, (forward, backward) in enumerate(ranks):
        after -= whole[rank] + 2 * hop * (rank > 0)
        filled = min(last - rank, m - 1) if plan.order == "1f1b" else 0
        first, final = max(after - filled * forward, 0.0), max(after - filled * backward, 0.0)
        both = filled < m - 1  # else the last microbatch is on its way during the first wait
        paths.append(before + m * whole[rank] + (min(after, first + final) if both else first))
        before += whole[rank] + 2 * hop
    slow = max(range(len(ranks)), key=paths.__getitem__)
    return slow, paths[slow]


def share_of_turns(cluster: Cluster, mean: float, own: float, path: float) -> float:
    """The share of a path's seconds that it takes where ranks share cores.

    A rank is up to ``turns`` times as fast while others wait.  Here each other rank computes with the same chance.

    Args:
        mean: busy seconds of a rank in a step, with all ranks busy.
        own: busy seconds of the path's rank.
        path: seconds of the path with all ranks busy.
    """
    n, turns = cluster.devices, cluster.turns
    if turns <= 1 or n == 1:
        return 1.0
    chance = min(1.0, (n * mean - own) / ((n - 1) * path))
    likely = [math.comb(n - 1, k) * chance**k * (1 - chance) ** (n - 1 - k) for k in range(n)]
    return sum(one * max(1 / turns, (1 + k) / n) for k, one in enumerate(likely))
