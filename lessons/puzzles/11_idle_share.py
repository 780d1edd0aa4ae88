"""Puzzle 11: a pipeline that is idle for a fifth of the time.

Fill in ``solve``: return a schedule for four ranks as text, a line per rank.  ``2F0`` is the forward of microbatch 0
on stage 2, ``2B0`` its backward; stage r is on rank r.  Choose the number of microbatches yourself.  A forward takes
one tick, a backward two.  The judge proves the schedule, times it, and trains with it.  Lesson 17 has the idea.

    plait lesson check 11
"""

from plait_lessons.judge import schedule

RANKS, IDLE = 4, 1 / 5


def solve(ranks: int) -> str:
    raise NotImplementedError


def judge(solve) -> list[str]:
    return schedule(solve(RANKS), RANKS, None, IDLE, None)
