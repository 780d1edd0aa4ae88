"""Puzzle 7: prefetch with room for one more layer.

Fill in ``solve``: the forward of six layers.  ``start(i)`` begins to gather layer i's weight and returns a handle at
once; ``handle.wait()`` returns the weight; ``compute(h, weight)`` is the layer.  Gather i + 1 must begin before layer i
computes.  Then it can hide there.  Only two weights may be in memory at a time.
Lesson 12 has the idea.

    plait lesson check 7
"""

from collections.abc import Callable
from typing import Any

import torch
from plait_lessons.judge import Alive, off, over
from torch import Tensor

import plait

RANKS, LAYERS, WIDTH, ROOM = 4, 6, 16, 2


def solve(start: Callable[[int], Any], compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    raise NotImplementedError


def judge(solve) -> list[str]:
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH) / 4 for _ in range(LAYERS)]
    x = torch.randn(8, WIDTH)

    def compute(h: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(h @ weight.T)

    expected = x
    for weight in weights:
        expected = compute(expected, weight)

    def body(comm: plait.Comm) -> tuple[Tensor, int, int]:
        alive, begun, done, hidden = Alive(), set(), [], []

        class Handle:
            def __init__(self, i: int) -> None:
                self.whole = alive.add(torch.empty_like(weights[i]))
                self.work = comm.all_gather(self.whole, weights[i].chunk(RANKS)[comm.rank].clone(), ("shard",))

            def wait(self) -> Tensor:
                self.work.wait()
                return self.whole

        def start(i: int) -> Handle:
            begun.add(i)
            return Handle(i)

        def layer(h: Tensor, weight: Tensor) -> Tensor:
            hidden.append(len(done) + 1 in begun)
            done.append(None)
            return compute(h, weight)

        found = solve(start, layer, x.clone())
        return found, alive.most, sum(hidden)

    size, problems = 4 * WIDTH * WIDTH, []
    for rank, (found, most, hidden) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        problems += off(f"rank {rank}, output", found, expected)
        problems += over(f"rank {rank} has {most} weights at once:", most * size, ROOM * size)
        problems += over(f"rank {rank} waits for", LAYERS - hidden, 1, "gathers that nothing hides")
    return problems
