"""Puzzle 13: weights wait, and fill the gaps.

Fill in ``solve``: return a schedule as text for four ranks and eight microbatches in which each backward is split:
``2I0`` computes the gradient of stage 2's input, which stage 1 waits for, and ``2W0`` later those of its weights.
Each of F, I and W takes one tick.  Ranks may be idle for a ninth of the time, where 1F1B is idle for 27 %, and may
hold four activations each, from F to W.  Lesson 17 has the idea.

    plait lesson check 13
"""

from plait_lessons.judge import schedule

RANKS, MICROBATCHES, IDLE, HELD = 4, 8, 1 / 9, 4


def solve(ranks: int, microbatches: int) -> str:
    raise NotImplementedError


def judge(solve) -> list[str]:
    return schedule(solve(RANKS, MICROBATCHES), RANKS, MICROBATCHES, IDLE, [HELD] * RANKS)
