"""Explores every interleaving of a few ranks, each a program that yields one atomic step at a time.

A program is a generator: it yields a step (a tuple, see ``Shared``) and gets its outcome back.  Where it stands is its
frames: their positions and locals.  So a program is written like the code that it models, and what a rank does next is
computed once for each place and outcome, then looked up.

Checked in every state that can be reached:

- a program's own assertions (what it reads is what it expects);
- no two ranks are about to touch one plain cell, one of them to write it: the program has no data race, so weakly
  ordered processors run it as these interleavings do (steps of semaphores and mailboxes are the only others);
- the end can be reached from there: no deadlock, and no wait without an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator
from typing import Any, TypeAlias

from protocol_steps import Program, Shared, Step, shown

State: TypeAlias = tuple[tuple[int, ...], tuple[Any, ...]]
"""Where each rank stands, and what they share."""

MOST_STATES = 400_000


class Places:
    """The places of one rank's program, found as they are asked for: an automaton."""

    def __init__(self, program: Callable[[], Program]) -> None:
        self._program = program
        self._known: dict[Hashable, int] = {}
        self._paths: list[tuple[Any, ...]] = []
        self.steps: list[Step | None] = []
        """What it does next at each place; None at its end."""
        self.errors: list[str] = []
        """Why it broke there, or nothing."""
        self._next: dict[tuple[int, Any], int] = {}
        self.start = self._place(())

    def after(self, place: int, outcome: Any) -> int:
        if (place, outcome) not in self._next:
            self._next[place, outcome] = self._place((*self._paths[place], outcome))
        return self._next[place, outcome]

    def _place(self, path: tuple[Any, ...]) -> int:
        program, error = self._program(), ""
        step: Step | None
        try:
            step = next(program)
            for outcome in path:
                step = program.send(outcome)
            key: Hashable = frames(program)
        except StopIteration:
            step, key = None, "end"
        except AssertionError as broken:
            step, key, error = None, ("broken", str(broken)), str(broken)
        if key not in self._known:
            self._known[key] = len(self.steps)
            self._paths.append(path)
            self.steps.append(step)
            self.errors.append(error)
        return self._known[key]


def frames(program: Any) -> Hashable:
    """Where a generator stands, with those that it yields from."""
    found, seen = [], dict[int, int]()
    while program is not None:
        frame = program.gi_frame
        found.append((program.gi_code.co_qualname, frame.f_lasti, frozen(frame.f_locals, seen)))
        program = program.gi_yieldfrom
    return tuple(found)


def frozen(value: Any, seen: dict[int, int]) -> Hashable:
    """A value that can be compared; objects that are met again are numbers."""
    if value is None or isinstance(value, int | str | float | frozenset):
        return value
    if isinstance(value, tuple):
        return tuple(frozen(one, seen) for one in value)
    if callable(value) or isinstance(value, Generator):
        return getattr(value, "__qualname__", str(type(value)))
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return ("dict", *((key, frozen(one, seen)) for key, one in value.items()))
    if isinstance(value, list | deque):
        return ("list", *(frozen(one, seen) for one in value))
    if isinstance(value, set):
        return frozenset(value)
    return (type(value).__name__, frozen(vars(value), seen))


class Finding(AssertionError):  # noqa: N818
    """A property that does not hold, and the steps that lead there."""

    def __init__(self, what: str, trace: list[tuple[int, str]], ranks: int) -> None:
        super().__init__(f"{what}\n{columns(trace, ranks)}")
        self.what, self.trace = what, trace


def check(
    programs: list[Callable[[], Program]], shared: Shared, start: tuple[Any, ...] = (), *, fused: bool = False
) -> int:
    """Explores all interleavings; how many states there are.

    Args:
        fused: what a rank gives follows its last step at once. Others may wait before they look, so nothing is lost.

    Raises:
        Finding: the shortest way to what should not be.
    """
    ranks = [Places(program) for program in programs]
    first: State = tuple(one.start for one in ranks), start
    came: dict[State, tuple[State, int, list[Any]] | None] = {first: None}
    backward: dict[State, list[State]] = {}
    ends, queue = list[State](), deque([first])

    def finding(state: State, what: str) -> Finding:
        trace, at = list[tuple[int, str]](), state
        while (origin := came[at]) is not None:
            at, rank, steps = origin
            trace += [(rank, told(step, outcome)) for step, outcome in reversed(steps)]
        return Finding(what, trace[::-1], len(ranks))

    def go_on(state: State, rank: int, done: list[tuple[Step, Any]]) -> Iterator[tuple[State, int, list[Any]]]:
        """A step of a rank, and those behind it that only give: others may have come before them as well."""
        places, memory = state
        step = ranks[rank].steps[places[rank]]
        for outcome, then in shared.outcomes(memory, rank, step) if step is not None else ():
            moved = (*places[:rank], ranks[rank].after(places[rank], outcome), *places[rank + 1 :])
            behind, now = ranks[rank].steps[moved[rank]], [*done, (step, outcome)]
            if fused and behind is not None and shared.gives(then, rank, behind):
                yield from go_on((moved, then), rank, now)
            else:
                yield (moved, then), rank, now

    while queue:
        state = queue.popleft()
        places, memory = state
        steps = [one.steps[place] for one, place in zip(ranks, places, strict=True)]
        for rank, place in enumerate(places):
            if error := ranks[rank].errors[place]:
                raise finding(state, f"rank {rank}: {error}")
        if clash := race(steps):
            raise finding(state, clash)
        if not any(steps):
            ends.append(state)
        alone = [rank for rank, step in enumerate(steps) if step is not None and shared.commutes(memory, rank, step)]
        following = [one for rank in alone[:1] or range(len(ranks)) for one in go_on(state, rank, [])]
        for rank in range(len(ranks)):
            for key, then in shared.buffered(memory, rank):
                following.append(((places, then), rank, [(("seen by all", key), None)]))
        for after, rank, done in following:
            backward.setdefault(after, []).append(state)
            if after not in came:
                came[after] = state, rank, done
                queue.append(after)
                assert len(came) <= MOST_STATES, "more states than a test has time for: make the scenario smaller"
    ending, stack = set(ends), list(ends)
    while stack:
        for state in backward.get(stack.pop(), ()):
            if state not in ending:
                ending.add(state)
                stack.append(state)
    for state in came:  # the shortest way comes first
        if state not in ending:
            left = [str(rank) for rank, place in enumerate(state[0]) if ranks[rank].steps[place] is not None]
            raise finding(state, f"rank {' and '.join(left)} would never come to an end")
    return len(came)


def race(steps: list[Step | None]) -> str:
    """Two plain accesses to one cell that nothing orders."""
    touched: dict[Hashable, tuple[int, str]] = {}
    for rank, step in enumerate(steps):
        if step is not None and step[0] in ("load", "store"):
            cell = step[1:] if step[0] == "load" else step[1:-1]
            other, kind = touched.setdefault(cell, (rank, step[0]))
            if other != rank and "store" in (kind, step[0]):
                return f"ranks {other} and {rank} touch {shown(cell)} at once"
    return ""


def told(step: Step, outcome: Any) -> str:
    text = " ".join(shown(one) for one in step)
    return text if outcome is None and step[0] != "poll" else f"{text}: {shown(outcome)}"


def columns(trace: list[tuple[int, str]], ranks: int) -> str:
    """One column for each rank."""
    width = max([8, *(len(text) for _, text in trace)])
    lines = ["  ".join(f"rank {rank}".ljust(width) for rank in range(ranks))]
    for rank, text in trace:
        lines.append("  ".join((text if rank == at else ".").ljust(width) for at in range(ranks)))
    return "\n".join(line.rstrip() for line in lines)
