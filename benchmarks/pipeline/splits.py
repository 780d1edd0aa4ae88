"""The number of links of each stage: by count, or so that ranks work equally long.

    even        blocks shared by count, the embedding with the first stage, norm and head with the last
    balanced    of all splits the one whose step should be shortest: m microbatches on the busiest rank, and p - 1
                waits for the dearest stage, which is the bubble of 1F1B

A rank's work depends on its *placement*, the stages that it owns:

    loop    stage r on rank r of p
    twice   stages r and p + r: interleaved orders
    v       stages r and 2p - 1 - r

so one model has several balanced splits. A link costs the seconds of its forward and backward of one microbatch,
the loss counted with the last one. The update is left out: it is done once per step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from typing import Literal

import torch
from harness.turns import no_collection
from models import NUM_MICROBATCHES, WORKLOADS, links, microbatches
from torch import Tensor

SplitName = Literal["even", "balanced"]
Placement = tuple[int, ...]
"""The rank of each stage."""
Seconds = list[tuple[float, float]]
"""Forward and backward of each link."""

WARM_UP = 3


def loop(ranks: int) -> Placement:
    """One stage per rank."""
    return tuple(range(ranks))


def twice(ranks: int) -> Placement:
    """Two stages per rank, stage s on rank s mod ``ranks``."""
    return loop(ranks) * 2


def v(ranks: int) -> Placement:
    """Down and up again: rank r has stages r and 2 ``ranks`` - 1 - r."""
    return loop(ranks) + loop(ranks)[::-1]


def even(num_links: int, num_stages: int) -> tuple[int, ...]:
    """Blocks by count, later stages one more where they do not divide; embedding, norm and head are no blocks."""
    num_blocks = num_links - 3
    starts = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    blocks = [end - start for start, end in pairwise(starts)]
    if min(blocks) < 1:
        raise ValueError(f"{num_blocks} blocks for {num_stages} stages: choose fewer --ranks")
    blocks[0] += 1
    blocks[-1] += 2
    return tuple(blocks)


def stage_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """The cost of each stage."""
    return [sum(costs[start:end]) for start, end in pairwise(accumulate(sizes, initial=0))]


def rank_costs(costs: Sequence[float], sizes: Sequence[int], placement: Placement) -> list[float]:
    """The work of each rank for one microbatch."""
    loads = [0.0] * (max(placement) + 1)
    for rank, cost in zip(placement, stage_costs(costs, sizes), strict=True):
        loads[rank] += cost
    return loads


def expected_seconds(costs: Sequence[float], sizes: Sequence[int], placement: Placement) -> float:
    """The time of a step: the busiest rank's work, and the bubble."""
    loads = rank_costs(costs, sizes, placement)
    return NUM_MICROBATCHES * max(loads) + (len(loads) - 1) * max(stage_costs(costs, sizes))


def balanced(costs: Sequence[float], placement: Placement) -> tuple[int, ...]:
    """The best of all splits."""
    cuts = combinations(range(1, len(costs)), len(placement) - 1)
    candidates = (tuple(end - start for start, end in pairwise((0, *cut, len(costs)))) for cut in cuts)
    return min(candidates, key=lambda sizes: expected_seconds(costs, sizes, placement))


def sizes_of(split: SplitName, costs: Sequence[float], placement: Placement) -> tuple[int, ...]:
    """Links per stage."""
    return balanced(costs, placement) if split == "balanced" else even(len(costs), len(placement))


def link_task(model: str, repeats: int) -> Seconds:
    """Measures on one rank the cost of each link per microbatch: medians over microbatches through all links."""
    workload = WORKLOADS[model]
    chain = links(workload.build())
    inputs, target = microbatches(workload.batch(0, 0, 1))[0]
    seconds: list[list[tuple[float, float]]] = [[] for _ in chain]
    for repeat in range(WARM_UP + repeats):
        with no_collection():
            taken: list[list[float]] = [[] for _ in chain]
            passed: list[tuple[Tensor, Tensor]] = []
            x = inputs
            for number, link in enumerate(chain):
                start = time.perf_counter()
                out = link(x)
                if number + 1 == len(chain):
                    out = workload.pair_loss_sum(out, target)
                taken[number].append(time.perf_counter() - start)
                passed.append((x, out))
                x = out.detach().requires_grad_()
            gradient: Tensor | None = None
            for number, (x, out) in reversed(list(enumerate(passed))):
                start = time.perf_counter()
                torch.autograd.backward(out, gradient)
                taken[number].append(time.perf_counter() - start)
                gradient = x.grad
        if repeat >= WARM_UP:
            for number, (forward, backward) in enumerate(taken):
                seconds[number].append((forward, backward))
    return [(statistics.median(f for f, _ in one), statistics.median(b for _, b in one)) for one in seconds]


def print_links(names: Sequence[str], seconds: Seconds) -> None:
    """The cost of each link, in milliseconds and as a share."""
    total = sum(f + b for f, b in seconds)
    print("\n| link | forward, ms | backward, ms | share |\n|---|---|---|---|")
    for name, (forward, backward) in zip(names, seconds, strict=True):
        print(f"| {name} | {1e3 * forward:.2f} | {1e3 * backward:.2f} | {(forward + backward) / total:.1%} |")
    print(f"| all | {1e3 * sum(f for f, _ in seconds):.2f} | {1e3 * sum(b for _, b in seconds):.2f} | |")


def print_splits(costs: Sequence[float], ranks: int, rows: Sequence[tuple[str, tuple[int, ...], Placement]]) -> None:
    """Splits, their stages, the load of the busiest rank (1 is a perfect balance) and the expected step."""
    print("\n| split | ranks of stages | links per stage | ms per stage | busiest rank / mean | expected step, ms |")
    print("|---|---|---|---|---|---|")
    for name, sizes, placement in rows:
        each = ", ".join(f"{1e3 * cost:.1f}" for cost in stage_costs(costs, sizes))
        busiest = max(rank_costs(costs, sizes, placement)) * ranks / sum(costs)
        where, links_each = (", ".join(map(str, numbers)) for numbers in (placement, sizes))
        expected = 1e3 * expected_seconds(costs, sizes, placement)
        print(f"| {name} | {where} | {links_each} | {each} | {busiest:.3f} | {expected:.0f} |")
