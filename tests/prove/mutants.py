"""Small layouts, and everything that one slip may make of their programs, schedules and moves.

A case is a buffer of a few elements on few ranks, cut evenly or not; a mutant is its programs with one thing changed.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from plait.referee.prove.program import COLLECTIVES, PHASES, Op, Program
from plait.referee.prove.scenes import Scene, of_ranks, scene_of
from plait.schedule.actions import Action, Schedule, owners
from plait.schedule.pipeline import Pipeline
from plait.table.cells import TABLE, Move, Moves, Strategy, moves
from plait.table.flat import FlatLayout, Slot, UnitLayout
from plait.table.mesh import DATA_AXES, Mesh


@dataclass(frozen=True)
class Case:
    """A buffer of one layout, and what is right of it."""

    name: str
    mesh: Mesh
    strategy: Strategy
    schedule: Schedule
    stage: int
    unit: UnitLayout
    scene: Scene

    @property
    def programs(self) -> Mapping[int, Program]:
        return self.scene.programs


def tiny(pieces: int, *, even: bool, itemsize: int = 4) -> FlatLayout:
    """Two parameters in a buffer of two elements for each piece, or of 0, 3, 1, 0, 3, 1, ... ."""
    bounds = [0]
    for k in range(pieces):
        bounds.append(bounds[-1] + (2 if even else (0, 3, 1)[(k + 1) % 3]))
    first = bounds[-1] // 2
    slots = (Slot("w", (first,), 0), Slot("b", (bounds[-1] - first,), first))
    return FlatLayout(slots, itemsize, tuple(bounds))


def make(row: str, mesh: str, order: str | None, *, hold: int | None = 1, even: bool = True, stage: int = 0) -> Case:
    """A case of one unit on a stage; with a tensor axis its gradients are summed over it."""
    on, strategy = Mesh.parse(mesh), TABLE[row]
    pipeline = Pipeline(order, on.pipe, hold=hold)
    schedule = pipeline.completed(2, strategy)
    unit = UnitLayout("a", (tiny(on.count(DATA_AXES), even=even),), (True,), summed=(on.tensor > 1,))
    name = f"{row}, {mesh}, {order}, hold {hold}, {'even' if even else 'uneven'}, stage {stage}"
    return Case(name, on, strategy, schedule, stage, unit, on_stage(schedule, stage, unit, on, strategy))


def on_stage(
    schedule: Schedule, stage: int, unit: UnitLayout, mesh: Mesh, strategy: Strategy, path: Moves | None = None
) -> Scene:
    """All ranks of a stage, with their operations on its unit."""
    pipe = owners(schedule)[stage]
    line = tuple(action for action in schedule[pipe] if action.stage == stage)
    ranks = [rank for rank in range(mesh.size) if mesh.coordinates(rank)["pipe"] == pipe]
    return scene_of(line, of_ranks(unit, 0, mesh, strategy, ranks, path), mesh, strategy)


CASES = (
    ("ddp", "shard=3", None, 1, True),
    ("ddp", "replica=2 pipe=2", "1f1b", 1, True),
    ("zero1", "shard=2 replica=2", None, 1, True),
    ("zero1", "shard=3", None, 1, False),
    ("zero2", "shard=3", None, 1, True),
    ("zero2", "shard=2 pipe=2", "zb_h1", 1, True),
    ("zero3", "shard=3", None, 1, False),
    ("zero3", "shard=2 pipe=2", "1f1b", 1, True),
    ("zero3", "shard=2 pipe=2", "interleaved", None, True),
    ("zero3_keep", "shard=3", None, 1, True),
    ("zero3_keep", "shard=2 pipe=2", "1f1b", None, True),
    ("hsdp", "shard=2 replica=2", None, 1, True),
    ("hsdp", "shard=2 tensor=2", None, 1, True),
    ("psdp", "shard=2 replica=2", None, 1, True),
    ("hpz", "shard=2 replica=2", None, 1, True),
    ("zero2", "shard=4 context=2", None, 1, True),
    ("hpz", "shard=2 replica=2 pipe=2", "zbv", 0, True),
)


def stages_of(row: str, mesh: str, order: str | None, hold: int | None, even: bool) -> list[Case]:
    """A case for each stage of a layout."""
    count = Pipeline(order, Mesh.parse(mesh).pipe, hold=hold).num_stages
    return [make(row, mesh, order, hold=hold, even=even, stage=stage) for stage in range(count)]


# ---- programs -----------------------------------------------------------------------------------------------------


def of_programs(case: Case, draw: random.Random, number: int) -> Iterator[tuple[str, dict[int, Program]]]:
    """Mutants of the programs: of one rank, or of all that have the operation in this place."""
    for _ in range(number):
        rank = draw.choice(sorted(case.programs))
        program = case.programs[rank]
        place = draw.randrange(len(program))
        kind = draw.choice(("delete", "double", "exchange", "exchange neighbours", "change", "change", "move", "copy"))
        everywhere = draw.random() < 0.4
        other = place + 1 if kind == "exchange neighbours" else draw.randrange(len(program))
        edit = _change(case, program[place], draw) if kind == "change" else None
        if (kind == "change" and edit is None) or other >= len(program) or (kind[:2] == "ex" and other == place):
            continue
        found = dict(case.programs)
        for r in case.programs if everywhere else (rank,):
            ops = list(case.programs[r])
            if max(place, other) >= len(ops) or ops[place].kind != program[place].kind:
                continue
            if kind == "delete":
                del ops[place]
            elif kind == "double":
                ops.insert(place, ops[place])
            elif kind == "copy":
                ops.insert(other, ops[place])
            elif kind == "move":
                ops.insert(other, ops.pop(place))
            elif edit is None:
                ops[place], ops[other] = ops[other], ops[place]
            else:
                ops[place] = _edited(ops[place], edit)
            found[r] = tuple(ops)
        what = f"{case.name}: {kind} {place} ({program[place]}) {edit or other} of {'all' if everywhere else rank}"
        if found != case.programs:
            yield what, found


def _change(case: Case, op: Op, draw: random.Random) -> dict[str, object] | None:
    """Another interval, group, root, buffer, microbatch, pass or divisor."""
    ways: list[dict[str, object]] = []
    if op.stop > op.start:
        ways += [{"by": d} for d in ((1, 0), (0, -1), (1, 1), (-1, -1), (0, 1), (2, 2), (-2, -2))]
    if op.kind in COLLECTIVES:
        ways += [
            {"axes": axes}
            for axes in (("shard",), ("replica",), DATA_AXES, ("tensor",), ("pipe",))
            if axes != op.axes and op.root < case.mesh.count(axes)
        ]
        ways += [
            {"kind": kind} for kind in COLLECTIVES if kind != op.kind and (op.root >= 0 or kind[:2] not in ("br",))
        ]
        ways += [{"root": 1 - min(op.root, 1)}] * (op.root >= 0)
    if op.buffer and op.kind not in ("close", "forget"):
        ways += [{"buffer": buffer} for buffer in ("rest", "full", "kept", "whole", "sum") if buffer != op.buffer]
    if op.kind in ("read", "gradient"):
        ways += [{"microbatch": 1 - op.microbatch}]
    if op.kind == "count":
        start, stop, step = op.rows
        ways += [
            {"rows": rows} for rows in ((start, stop, step + 1), (start, stop - step, step), (start, stop + step, step))
        ]
    return draw.choice(ways) if ways else None


def _edited(op: Op, edit: dict[str, object]) -> Op:
    if "by" in edit:
        low, high = edit["by"]  # type: ignore[misc]
        return op._replace(start=op.start + low, stop=op.stop + high)
    if edit.get("kind") in ("broadcast", "reduce") and op.root < 0:
        return op._replace(kind=str(edit["kind"]), root=0)
    return op._replace(**edit)  # type: ignore[arg-type]


# ---- schedules and tables -----------------------------------------------------------------------------------------


def of_schedules(case: Case, draw: random.Random, number: int) -> Iterator[tuple[str, dict[int, Program]]]:
    """Mutants of the completed schedule, which reach all ranks of a pipeline coordinate."""
    for _ in range(number):
        lines = [list(line) for line in case.schedule]
        line = draw.choice(lines)
        place, other = draw.randrange(len(line)), draw.randrange(len(line))
        kind = draw.choice(("delete", "double", "exchange", "move", "microbatch"))
        what = f"{case.name}: schedule, {kind} {place} ({line[place]}) {other}"
        if kind == "delete":
            del line[place]
        elif kind == "double":
            line.insert(other, line[place])
        elif kind == "exchange":
            line[place], line[other] = line[other], line[place]
        elif kind == "move":
            line.insert(other, line.pop(place))
        elif line[place].microbatch >= 0:
            line[place] = replace(line[place], microbatch=1 - line[place].microbatch)
        schedule = tuple(tuple[Action, ...](line) for line in lines)
        if owners(schedule) == owners(case.schedule):
            programs = on_stage(schedule, case.stage, case.unit, case.mesh, case.strategy).programs
            if programs != case.programs:
                yield what, programs


def of_tables(case: Case) -> Iterator[tuple[str, dict[int, Program]]]:
    """Every move of the row left out, doubled, over other axes, of another kind, inside of other cuts."""
    right = moves(case.strategy)
    for phase in PHASES:
        path: tuple[Move, ...] = getattr(right, phase)
        wrong: list[tuple[Move, ...]] = [path[::-1]] if len(path) > 1 else []
        for i, move in enumerate(path):
            wrong += [(*path[:i], *path[i + 1 :]), (*path[: i + 1], *path[i:])]
            others = [replace(move, axes=axes) for axes in (("shard",), ("replica",), DATA_AXES, DATA_AXES[::-1])]
            others += [replace(move, kind=kind) for kind in ("all_gather", "reduce_scatter", "all_reduce", "slice")]
            others += [replace(move, outer=outer) for outer in ((), ("shard",), ("replica",))]
            wrong += [(*path[:i], other, *path[i + 1 :]) for other in others if other != move]
        for changed in wrong:
            moved: Moves = replace(right, **{phase: changed})
            try:
                programs = on_stage(case.schedule, case.stage, case.unit, case.mesh, case.strategy, moved).programs
            except ValueError:
                continue  # a cut that the buffer does not have
            if programs != case.programs:
                yield f"{case.name}: {phase} {', '.join(map(str, changed))}", programs
