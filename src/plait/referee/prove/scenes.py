"""The claims about a layout, their counterexamples, and the ranks that are enough to prove them.

sums        an update's gradient has every sample of every data rank once, added in the row's order
owners      every element has one owner in each group over which the optimizer's cell is cut, is updated once,
            and published to every rank that has it at rest
reads       every pass reads the values that were published last
messages    all members of a collective mean the same, and no rank waits forever; sends: ``schedule.check``

``of_flat`` returns the ranks that share one flat buffer, and their operations on it.  One rank of each kind is enough
if ranks behave the same: see ``symmetry``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.referee.prove.program import AGAIN, Key, Program, Settled, settle, write_program
from plait.referee.prove.sums import Sums, promised
from plait.schedule.actions import (
    ADDS_GRADIENTS,
    Line,
    count_microbatches,
)
from plait.table.cells import Strategy, moves
from plait.table.flat import UnitLayout
from plait.table.mesh import Mesh

Laid = Mapping[tuple[int, int], Sequence[UnitLayout]]
"""The units of each stage (first) on each tensor rank (second)."""
BETWEEN_STAGES = ("send", "recv", "report")
"""Operations that concern several stages, but no buffer."""


@dataclass(frozen=True)
class Counterexample:
    """The place where a layout differs from the run of a single process."""

    what: str
    """The claim that fails: ``sums``, ``owners``, ``reads`` or ``messages``."""
    text: str
    rank: int = -1
    step: int = 0
    parameter: str = ""
    element: int = -1
    """The element of the unit's flat buffer; -1 if none is at fault."""
    microbatch: int = -1

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank >= 0 else []
        where += [f"step {self.step}"] if self.rank >= 0 else []
        where += [f"parameter {self.parameter}" if self.parameter else ""]
        where += [f"element {self.element} of the flat buffer" if self.element >= 0 else ""]
        where += [f"microbatch {self.microbatch}" if self.microbatch >= 0 else ""]
        return f"{self.what}: {self.text}" + (f" ({', '.join(filter(None, where))})" if any(where) else "")


class Refuted(Exception):  # noqa: N818
    """A proof failed; ``example`` says where."""

    def __init__(self, example: Counterexample) -> None:
        super().__init__(str(example))
        self.example = example


@dataclass(frozen=True)
class Scene:
    """The ranks that take part, and the expected sums and reads."""

    mesh: Mesh
    flats: Mapping[int, Mapping[Key, Settled]]
    """The buffers that each rank works on, by rank."""
    owned_by: tuple[str, ...]
    """The axes over which the optimizer's cell is cut."""
    due: Mapping[Key, int]
    """The number of each buffer's gradient sum."""
    reads: Mapping[Key, frozenset[tuple[str, int]]]
    """The pass and microbatch of each read of a buffer in a step."""


def expected(
    keys: Mapping[Key, Settled], lines: Mapping[int, Line], mesh: Mesh, strategy: Strategy, sums: Sums
) -> tuple[dict[Key, int], dict[Key, frozenset[tuple[str, int]]]]:
    """The expected sum of each trained buffer, and the expected reads of each buffer in a step.

    Args:
        lines: by stage, the line of the rank that has it.
    """
    due: dict[Key, int] = {}
    reads: dict[Key, frozenset[tuple[str, int]]] = {}
    for key, flat in keys.items():
        order = tuple(a.microbatch for a in lines[key[0]] if a.kind in ADDS_GRADIENTS and a.stage == key[0])
        count = count_microbatches((lines[key[0]],))
        order = order if sorted(order) == list(range(count)) else tuple(range(count))
        ways: tuple[str, ...] = ("F", "B") if flat.differentiated else ("F",)
        ways += tuple(f"{way}{AGAIN}" for way in ways) if flat.again else ()
        reads[key] = frozenset((way, m) for way in ways for m in range(count))
        if flat.trains:
            due[key] = promised(sums, strategy, mesh, order, summed=flat.summed, axes=flat.axes)
    return due, reads


def of_ranks(
    stage: int, unit: UnitLayout, index: int, mesh: Mesh, strategy: Strategy, ranks: Sequence[int]
) -> dict[int, Settled]:
    """One buffer of a unit on each of the ranks."""
    path = moves(strategy, mesh, unit.axes)
    return {rank: settle(stage, unit, index, mesh, strategy, path, rank) for rank in ranks}


def program_of(line: Line, flat: Settled, mesh: Mesh) -> Program:
    """The operations on one buffer in the line of its pipeline rank."""
    stage = flat.key[0]
    own = tuple(action for action in line if action.stage == stage)
    return tuple(op for op in write_program(own, {stage: (flat,)}, mesh) if op.kind not in BETWEEN_STAGES)


def of_flat(
    line: Line, flats: Mapping[int, Settled], mesh: Mesh, strategy: Strategy, sums: Sums
) -> tuple[Scene, dict[int, Program]]:
    """The scene of the ranks that share one flat buffer, and their operations on it.

    Args:
        flats: the buffer, by rank.
    """
    programs = {rank: program_of(line, flat, mesh) for rank, flat in flats.items()}
    keyed = {rank: {flat.key: flat} for rank, flat in flats.items()}
    buffers = next(iter(keyed.values()))
    ((stage, _, _),) = buffers
    due, reads = expected(buffers, {stage: line}, mesh, strategy, sums)
    (axes,) = {flat.axes for flat in flats.values()}
    return Scene(mesh, keyed, axes.of(strategy.optim.split), due, reads), programs
