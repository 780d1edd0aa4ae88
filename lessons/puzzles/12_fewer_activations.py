"""Puzzle 12: GPipe's idle time with half of its activations.

Fill in ``solve``: return a schedule as text, as in puzzle 11, for the given numbers of ranks and microbatches.  It
may be idle for (p - 1) / (m + p - 1) of the time, and rank r may hold p - r activations at once, from a forward to
its backward.  The judge asks for eight microbatches, and for two.  Lesson 17 has the idea, and fault 7 the trap.

    plait lesson check 12
"""

from plait_lessons.judge import schedule

RANKS = 4


def solve(ranks: int, microbatches: int) -> str:
    raise NotImplementedError


def judge(solve) -> list[str]:
    problems = []
    for m in (8, 2):
        idle, held = (RANKS - 1) / (m + RANKS - 1), [RANKS - rank for rank in range(RANKS)]
        found = schedule(solve(RANKS, m), RANKS, m, idle, held)
        problems += [f"{m} microbatches: {problem}" for problem in found]
    return problems
