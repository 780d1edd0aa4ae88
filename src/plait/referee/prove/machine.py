"""Carries out programs on sets instead of numbers: which rank has which version, and which samples are in which sum.

    rest, full, kept     interval ──► the step for which its values were published
    whole, sum           interval ──► a number of ``Sums``: which samples, in which order

Every rank obeys its program.  A collective waits until its whole group has reached it.  ``schedule.check`` proves the
messages between stages.  Memory that a collective leaves undefined has no value: a read, an update or a sum that uses
it is refuted.

Programs run for two steps, because the remains of a step (a copy that is kept too long, a sum that is not cleared) harm
the next one.  A refutation names a rank, an element and, if there is one, a microbatch.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from plait.referee.prove.program import AGAIN, COLLECTIVES, Op
from plait.referee.prove.scenes import Counterexample, Refuted, Scene
from plait.referee.prove.sums import Pieces, added, cut, lacking, left_behind, misowned, part_name, value_at, write
from plait.table.agreement import DATA_ORDER
from plait.table.cells import EXPERTS
from plait.table.collectives import CUT_EVENLY

STEPS = 2
"""The number of steps that are carried out: the remains of a step harm the next one."""


@dataclass
class _Values:
    """One rank's values of the buffer."""

    rest: Pieces
    full: Pieces = field(default_factory=list)
    kept: Pieces = field(default_factory=list)
    whole: Pieces = field(default_factory=list)
    sum: Pieces = field(default_factory=list)
    seen: set[tuple[str, int]] = field(default_factory=set)
    """The reads of this step."""
    summing: bool = False
    """True if a gradient was added to ``sum`` since it was cleared."""


@dataclass
class _Rank:
    """One rank, and its progress."""

    program: Sequence[Op]
    values: _Values
    at: int = 0
    step: int = 0
    counted: bool = False


class Machine:
    """The ranks of a scene at work; ``run`` carries out all programs, or raises ``Refuted``."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.mesh, self.sums = scene, scene.mesh, scene.sums
        end = Op("end")
        self.ranks = {
            rank: _Rank((*program, end) * STEPS, _Values([(*scene.flats[rank].held, version(0))]))
            for rank, program in scene.programs.items()
        }
        self.meeting: dict[tuple[int, ...], dict[int, Op]] = defaultdict(dict)
        self.groups: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
        self.ready = deque(self.ranks)
        self.right: set[tuple[int, int, int]] = set()
        """The divisors that count every rank's targets once."""
        self.parts = {rank: self.mesh.index(rank, DATA_ORDER) for rank in scene.programs}
        """The part of the batch that each rank works on; under a context axis, a part of its samples' time."""
        self.owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """The rank and the interval of each update, by step."""
        self._handlers: dict[str, Callable[[int, _Rank, Op], bool]] = {
            "open": self._open, "close": self._drop, "forget": self._drop, "clear": self._drop, "keep": self._keep,
            "read": self._read, "gradient": self._gradient, "add": self._add, "update": self._update,
            "count": self._count, "end": self._end, **dict.fromkeys(COLLECTIVES, self._meet),
        }  # fmt: skip

    def run(self) -> None:
        """Carries out all programs to their ends."""
        while self.ready:
            number = self.ready.popleft()
            rank = self.ranks[number]
            while rank.at < len(rank.program):
                op = rank.program[rank.at]
                if not self._handlers[op.kind](number, rank, op):
                    break
                rank.at += 1
        stuck = [number for number, rank in self.ranks.items() if rank.at < len(rank.program)]
        if stuck:
            self._refute_stuck(stuck)
        for step, updates in self.owners.items():
            numel = {number: self.scene.flats[number].layout.numel for number, _, _ in updates}
            if wrong := misowned(updates, self.mesh, self.scene.owned_by, numel):
                number, element, text = wrong
                error = self._refute("owners", text, number, Op("update"), element)
                raise Refuted(replace(error.example, step=step))

    # ---- refutations --------------------------------------------------------------------------------------------

    def _refute(self, what: str, text: str, number: int, op: Op, element: int = -1) -> Refuted:
        rank, parameter = self.ranks[number], ""
        if element >= 0:
            flat = self.scene.flats[number]
            inside = [slot.name for slot in flat.layout.slots if slot.offset <= element < slot.end]
            parameter = inside[0] if inside else f"padding of {flat.name}"
        return Refuted(Counterexample(what, text, number, rank.step, parameter, element, op.microbatch))

    def _refute_stuck(self, stuck: Sequence[int]) -> None:
        number = stuck[0]
        rank = self.ranks[number]
        op = rank.program[rank.at]
        group = self._group(number, op)
        missing = next(member for member in group if member not in self.meeting[group])
        other = self.ranks[missing]
        at = other.program[other.at] if other.at < len(other.program) else "the end of its program"
        text = f"deadlock: it waits forever at {op} for rank {missing}, which is at {at}"
        raise Refuted(Counterexample("messages", text, number, rank.step, microbatch=op.microbatch))

    # ---- memory -------------------------------------------------------------------------------------------------

    def _open(self, number: int, rank: _Rank, op: Op) -> bool:
        rank.values.full = cut(getattr(rank.values, op.buffer), op.start, op.stop)
        return True

    def _drop(self, number: int, rank: _Rank, op: Op) -> bool:
        setattr(rank.values, op.buffer, [])
        rank.values.summing = rank.values.summing and op.buffer != "sum"
        return True

    def _keep(self, number: int, rank: _Rank, op: Op) -> bool:
        rank.values.kept = cut(rank.values.full, op.start, op.stop)
        return True

    def _read(self, number: int, rank: _Rank, op: Op) -> bool:
        values, flat = rank.values, self.scene.flats[number]
        now, stop = rank.step if flat.trains else 0, flat.layout.numel
        pieces = getattr(values, op.buffer)
        if (op.start, op.stop) != (0, stop):
            raise self._refute("reads", f"pass {op.phase} does not read all of {flat.name}: {op}", number, op)
        wrong = lacking(pieces, 0, stop, version(now))
        if wrong >= 0:
            found = value_at(pieces, wrong)
            has: dict[int | None, str] = {version(step): f"its value of step {step}" for step in range(STEPS + 1)}
            text = f"pass {op.phase} reads {has.get(found, 'memory that does not hold it')}, and not that of step {now}"
            raise self._refute("reads", text, number, op, wrong)
        way, m = op.phase, op.microbatch
        if (way, m) in values.seen:
            raise self._refute("reads", f"pass {way} of {flat.name} runs twice", number, op)
        if way[0] == "B" and (f"F{way[1:]}", m) not in values.seen:
            raise self._refute("reads", f"the backward of {flat.name} comes before its forward", number, op)
        values.seen.add((way, m))
        return True

    # ---- sums ---------------------------------------------------------------------------------------------------

    def _gradient(self, number: int, rank: _Rank, op: Op) -> bool:
        values, flat = rank.values, self.scene.flats[number]
        ways = ("B", f"B{AGAIN}") if flat.again else ("B",)
        if not rank.counted or any((way, op.microbatch) not in values.seen for way in ways):
            raise self._refute("sums", f"{flat.name} has a gradient before its backward", number, op)
        tensor = self.mesh.index(number, ("tensor",)) if flat.summed else 0
        leaf: int | None = self.sums.leaf(self.parts[number], tensor, op.microbatch)
        if flat.axes == EXPERTS:
            group = self.mesh.group(number, ("expert",))
            leaf = self.sums.gathered((self.parts[member] for member in group), op.microbatch)
        self._accumulate(values, op.buffer, [(op.start, op.stop, leaf)])
        return True

    def _add(self, number: int, rank: _Rank, op: Op) -> bool:
        self._accumulate(rank.values, "sum", cut(rank.values.whole, op.start, op.stop))
        rank.values.whole = []
        return True

    def _accumulate(self, values: _Values, buffer: str, pieces: Pieces) -> None:
        """Copies the first pieces after a clear into ``sum``, and adds later ones."""
        if buffer == "sum" and values.summing:
            values.sum = added(values.sum, pieces, self.sums)
        else:
            setattr(values, buffer, pieces)
            values.summing = values.summing or buffer == "sum"

    def _update(self, number: int, rank: _Rank, op: Op) -> bool:
        values, now, due = rank.values, rank.step, self.scene.due
        wrong = lacking(values.sum, op.start, op.stop, due)
        if wrong >= 0:
            text = self.sums.compared(value_at(values.sum, wrong), due, self.mesh.context)
            raise self._refute("sums", f"the gradient that is used for an update is wrong: {text}", number, op, wrong)
        wrong = lacking(values.rest, op.start, op.stop, version(now))
        if wrong >= 0:
            twice = value_at(values.rest, wrong) == version(now + 1)
            text = "it is updated twice" if twice else "it is updated where its newest value is not"
            raise self._refute("owners", text, number, op, wrong)
        values.rest = write(values.rest, op.start, op.stop, [(op.start, op.stop, version(now + 1))])
        self.owners[rank.step].append((number, op.start, op.stop))
        return True

    # ---- messages -----------------------------------------------------------------------------------------------

    def _group(self, number: int, op: Op) -> tuple[int, ...]:
        if (number, op.axes) not in self.groups:
            group = self.mesh.group(number, op.axes)
            self.groups.update({(member, op.axes): group for member in group})
        return self.groups[number, op.axes]

    def _meet(self, number: int, rank: _Rank, op: Op) -> bool:
        group = self._group(number, op)
        there = self.meeting[group]
        there[number] = op
        if len(there) < len(group):
            return False
        del self.meeting[group]
        for member, other in there.items():
            if other[:3] != op[:3] or other[4:7] != op[4:7]:
                text = f"{op} meets {other} of rank {member} in one collective"
                raise self._refute("messages", text, number, op)
        self._collective(group, op)
        for member in group:
            if member != number:
                self.ranks[member].at += 1
                self.ready.append(member)
        return True

    def _collective(self, group: tuple[int, ...], op: Op) -> None:
        if op.start < 0 or op.stop > self.scene.flats[group[0]].layout.numel:
            raise self._refute("messages", f"{op} is longer than its buffer", group[0], op)
        if op.kind in CUT_EVENLY and (op.stop - op.start) % len(group):
            text = f"{op}: {op.stop - op.start} elements do not make equal pieces for {len(group)} ranks"
            raise self._refute("messages", text, group[0], op)
        members = [self.ranks[member].values for member in group]
        contents: list[Pieces] = [getattr(values, op.buffer) for values in members]
        sizes = [self.mesh.axis(axis) for axis in op.axes]
        for values, content in zip(members, left_behind(op, contents, sizes, self.sums), strict=True):
            setattr(values, op.buffer, content)

    def _count(self, number: int, rank: _Rank, op: Op) -> bool:
        if max(op.rows[:2]) > self.mesh.size:
            raise self._refute("sums", "the divisor of the loss counts ranks that are not there", number, op)
        if op.rows not in self.right:
            counted = Counter(self.mesh.index(row, DATA_ORDER) for row in range(*op.rows))
            for part in range(self.mesh.count(DATA_ORDER)):
                if counted[part] != 1:
                    whose = part_name(part, self.mesh.context)
                    text = f"the divisor of the loss counts the targets of {whose} {counted[part]} times"
                    raise self._refute("sums", text, number, op)
            self.right.add(op.rows)
        rank.counted = True
        return True

    # ---- the end ------------------------------------------------------------------------------------------------

    def _end(self, number: int, rank: _Rank, op: Op) -> bool:
        values, flat = rank.values, self.scene.flats[number]
        if lost := sorted(self.scene.reads - values.seen):
            text = f"pass {lost[0][0]} of {flat.name} does not run"
            raise self._refute("reads", text, number, op._replace(microbatch=lost[0][1]))
        wrong = lacking(values.rest, *flat.held, version(rank.step + 1)) if flat.trains else -1
        if wrong >= 0:
            text = "its new value is not published to a rank that has it at rest"
            raise self._refute("owners", text, number, op, wrong)
        values.seen.clear()
        rank.counted = False
        rank.step += 1
        return True


def version(step: int) -> int:
    """The number of the values that a step reads; ``Sums`` never gives it."""
    return -1 - step
