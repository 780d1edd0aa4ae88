"""Carries out programs with numbers, element by element: the reference for the abstract machine.

It shares only the operations with the machine: buffers are lists with one number per element, ranks take
turns, a group's sum is folded axis by axis over a dict of coordinates.  None is unwritten memory.

Two runs show the effect of a change.  With ``exact`` addition every sample is another power of two, so a sum shows
which samples are in it and how often.  With ``ordered`` addition no two orders give the same number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from plait.referee.prove.program import COLLECTIVES, Op, Program, Settled
from plait.table.mesh import Mesh

Add = Callable[[int, int], int]
Numbers = list[Any]


def exact(a: int, b: int) -> int:
    return a + b


def ordered(a: int, b: int) -> int:
    return (31 * a + 17 * b + 7) % (2**61 - 1)


@dataclass
class Memory:
    """One flat buffer of one rank."""

    rest: Numbers
    full: Numbers
    kept: Numbers
    whole: Numbers
    sum: Numbers
    summing: bool = False
    """Something is in ``sum``."""


@dataclass
class Person:
    """One rank."""

    ops: list[Op]
    memory: Memory
    at: int = 0
    step: int = 0
    divisor: Any = None
    ran: set[tuple[str, int]] = field(default_factory=set)
    """The passes of this step that have read the flat."""
    log: list[object] = field(default_factory=list)


def simulate(
    programs: Mapping[int, Program], flats: Mapping[int, Settled], mesh: Mesh, add: Add, steps: int = 2
) -> object:
    """All that a run does that could be seen: parameters, reads, updates.  A text where it cannot go on."""
    people = {}
    for rank, program in programs.items():
        (start, stop), n = flats[rank].held, flats[rank].layout.numel
        at_rest = [1000 + e if start <= e < stop else None for e in range(n)]
        people[rank] = Person([*program, Op("end")] * steps, Memory(at_rest, *([None] * n for _ in range(4))))
    world = World(people, flats, mesh, add)
    while True:
        moved = False
        for rank, person in people.items():
            while person.at < len(person.ops):
                try:
                    if not world.do(rank, person, person.ops[person.at]):
                        break
                except WrongError as wrong:
                    return f"wrong: {wrong}"
                person.at += 1
                moved = True
        if all(person.at == len(person.ops) for person in people.values()):
            break
        if not moved:
            return "stuck"
    rests = {r: tuple(p.memory.rest[slice(*flats[r].held)]) for r, p in people.items()}
    return rests, {r: sorted(p.log, key=repr) for r, p in people.items()}


class WrongError(Exception):
    """A transport would refuse, or something reads what is not there."""


@dataclass
class World:
    people: dict[int, Person]
    flats: Mapping[int, Settled]
    mesh: Mesh
    add: Add
    groups: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = field(default_factory=dict)

    def group(self, rank: int, op: Op) -> tuple[int, ...]:
        if (rank, op.axes) not in self.groups:
            self.groups[rank, op.axes] = self.mesh.group(rank, op.axes)
        return self.groups[rank, op.axes]

    def plus(self, a: Any, b: Any) -> Any:
        return None if a is None or b is None else self.add(a, b)

    def do(self, rank: int, person: Person, op: Op) -> bool:
        """Carries one operation out; False where it has to wait."""
        if op.kind in COLLECTIVES:
            return self.together(rank, op)
        if op.kind == "count":
            if max(op.rows[:2]) > self.mesh.size:
                raise WrongError("no such row")
            person.divisor = tuple(sorted(self.mesh.index(row, ("replica", "shard")) for row in range(*op.rows)))
            return True
        if op.kind == "end":
            person.step, person.divisor = person.step + 1, None
            person.ran.clear()
            return True
        mine, flat = person.memory, self.flats[rank]
        n = flat.layout.numel
        span = range(max(op.start, 0), min(op.stop, n))
        nothing: Numbers = [None] * n
        if op.kind == "open":
            source = getattr(mine, op.buffer)
            mine.full = [source[e] if e in span else None for e in range(n)]
        elif op.kind == "keep":
            mine.kept = [mine.full[e] if e in span else None for e in range(n)]
        elif op.kind in ("close", "forget", "clear"):
            setattr(mine, op.buffer, nothing)
            mine.summing = mine.summing and op.buffer != "sum"
        elif op.kind == "read":
            seen = tuple(getattr(mine, op.buffer)) if (op.start, op.stop) == (0, n) else None
            first = op.phase == "F" or ("F", op.microbatch) in person.ran
            person.log.append((person.step, "read", op.phase, op.microbatch, seen, first))
            person.ran.add((op.phase, op.microbatch))
        elif op.kind == "gradient":
            at = self.mesh.coordinates(rank)
            parts = self.mesh.replica * self.mesh.shard
            part = at["replica"] * self.mesh.shard + at["shard"]
            place = (part * self.mesh.tensor + at["tensor"] * flat.summed) * 8 + op.microbatch
            ready = ("B", op.microbatch) in person.ran and person.divisor == tuple(range(parts))
            value = 1 << (4 * place) if ready else None
            self.accumulate(mine, op.buffer, dict.fromkeys(span, value))
        elif op.kind == "add":
            self.accumulate(mine, "sum", {e: mine.whole[e] for e in span})
            mine.whole = nothing
        elif op.kind == "update":
            used = tuple(mine.sum[e] for e in span)
            if span:
                person.log.append((person.step, "update", op.start, op.stop, used))
            for e in span:
                mine.rest[e] = self.plus(None if mine.rest[e] is None else 3 * mine.rest[e], mine.sum[e])
        else:
            raise AssertionError(op)
        return True

    def accumulate(self, mine: Memory, buffer: str, values: Mapping[int, Any]) -> None:
        n = len(mine.rest)
        if buffer == "sum" and mine.summing:
            mine.sum = [self.plus(mine.sum[e], values.get(e)) for e in range(n)]
        else:
            setattr(mine, buffer, [values.get(e) for e in range(n)])
            mine.summing = mine.summing or buffer == "sum"

    # ---- groups ---------------------------------------------------------------------------------------------------

    def together(self, rank: int, op: Op) -> bool:
        group = self.group(rank, op)
        ops = []
        for member in group:
            person = self.people[member]
            other = person.ops[person.at] if person.at < len(person.ops) else None
            if other is None or other.kind not in COLLECTIVES or self.group(member, other) != group:
                return False
            ops.append(other)
        if len({(o.kind, o.axes, o.stop - o.start, o.root, o.buffer) for o in ops}) > 1:
            raise WrongError("members mean different things")
        self.move(group, ops)
        for member in group:
            if member != rank:
                self.people[member].at += 1
        return True

    def move(self, group: tuple[int, ...], ops: list[Op]) -> None:
        op, n = ops[0], len(group)
        arrays = [getattr(self.people[m].memory, op.buffer) for m in group]
        size = op.stop - op.start
        if any(o.start < 0 or o.stop > len(array) for o, array in zip(ops, arrays, strict=True)):
            raise WrongError("outside of the buffer")
        views = [array[o.start : o.stop] for o, array in zip(ops, arrays, strict=True)]
        if op.kind not in ("broadcast", "reduce", "all_reduce") and size % n:
            raise WrongError("pieces are not equal")
        each = size // n
        if op.kind == "all_gather":
            whole = [x for k, view in enumerate(views) for x in view[k * each : (k + 1) * each]]
            results = [whole] * n
        elif op.kind == "broadcast":
            results = [views[op.root]] * n
        else:
            total = [self.fold([view[e] for view in views], op.axes) for e in range(size)]
            results = []
            for k in range(n):
                if op.kind == "reduce_scatter":
                    results.append([x if k * each <= e < (k + 1) * each else None for e, x in enumerate(total)])
                else:
                    results.append(total if op.kind == "all_reduce" or k == op.root else [None] * size)
        for o, array, result in zip(ops, arrays, results, strict=True):
            array[o.start : o.stop] = result

    def fold(self, values: list[Any], axes: tuple[str, ...]) -> Any:
        """The first axis is folded first."""
        at = dict(zip(product(*(range(self.mesh.axis(a)) for a in axes)), values, strict=True))
        for _ in axes:
            rest: dict[tuple[int, ...], Any] = {}
            for place in sorted(at):
                key = place[1:]
                rest[key] = self.plus(rest[key], at[place]) if key in rest else at[place]
            at = rest
        return at[()]
