"""A walk through a schedule in an order that works: every rank in the order of its line, nothing before what it needs.

Any order that works will do: an action meets the same in all of them.  The proof asks who is left waiting (``check``),
the simulator when each action would start (``simulate``).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from plait.schedule.actions import Action, Schedule

Thing = TypeVar("Thing", bound=Hashable)
"""What actions wait for."""


def walk(
    schedule: Schedule, attempt: Callable[[int, Action], tuple[Thing | None, Iterable[Thing]]]
) -> dict[int, tuple[int, Thing]]:
    """Who is left waiting in the end, as rank -> (index in its line, for what); nobody, if the schedule is right.

    ``attempt`` tells what an action of a rank still waits for; or carries it out, and tells what others may now have.
    """
    at = [0] * len(schedule)
    waiting: dict[Thing, list[int]] = defaultdict(list)
    ready = deque(range(len(schedule)))
    while ready:
        rank = ready.popleft()
        line, index = schedule[rank], at[rank]
        while index < len(line):
            lacks, there = attempt(rank, line[index])
            if lacks is not None:
                waiting[lacks].append(rank)
                break
            for thing in there:
                ready.extend(waiting.pop(thing, ()))
            index += 1
        at[rank] = index
    return {rank: (at[rank], thing) for thing, ranks in waiting.items() for rank in ranks}
