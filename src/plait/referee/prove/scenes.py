"""The claims about a layout, their counterexamples, and the ranks that are enough to prove them.

sums        an update's gradient has every sample of every data rank once, added in the row's order
owners      every element has one owner in each group over which the optimizer's cell is cut, is updated once,
            and published to every rank that has it at rest
reads       every pass reads the values that were published last
messages    all members of a collective mean the same, and no rank waits forever; sends: ``schedule.check``

A scene is one flat buffer on the ranks that share it.  One rank of each kind is enough if ranks behave the same: see
``symmetry``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.referee.prove.program import AGAIN, Program, Settled, settle, write_program
from plait.referee.prove.sums import Sums, promised
from plait.schedule.actions import ADDS_GRADIENTS, Line, count_microbatches
from plait.table.cells import Moves, Strategy, moves
from plait.table.flat import UnitLayout
from plait.table.mesh import Mesh

Laid = Mapping[tuple[int, int], Sequence[UnitLayout]]
"""The units of each stage (first) on each tensor rank (second)."""


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
    """The ranks that share a flat buffer, their operations on it, and what is due of it."""

    mesh: Mesh
    flats: Mapping[int, Settled]
    """The buffer, by rank."""
    programs: Mapping[int, Program]
    owned_by: tuple[str, ...]
    """The axes over which the optimizer's cell is cut."""
    due: int
    """The number of its gradient's sum."""
    reads: frozenset[tuple[str, int]]
    """The pass and microbatch of each read in a step."""
    sums: Sums


def scene_of(line: Line, flats: Mapping[int, Settled], mesh: Mesh, strategy: Strategy) -> Scene:
    """The scene of a flat buffer.

    Args:
        line: the actions of the buffer's stage.
        flats: the buffer, by rank.
    """
    flat, sums = next(iter(flats.values())), Sums()
    programs = {rank: write_program(line, one, mesh) for rank, one in flats.items()}
    order = tuple(action.microbatch for action in line if action.kind in ADDS_GRADIENTS)
    count = count_microbatches((line,))
    order = order if sorted(order) == list(range(count)) else tuple(range(count))
    ways: tuple[str, ...] = ("F", "B") if flat.differentiated else ("F",)
    ways += tuple(f"{way}{AGAIN}" for way in ways) if flat.again else ()
    due = promised(sums, strategy, mesh, order, summed=flat.summed, axes=flat.axes)
    reads = frozenset((way, m) for way in ways for m in range(count))
    return Scene(mesh, flats, programs, flat.axes.of(strategy.optim.split), due, reads, sums)


def of_ranks(
    unit: UnitLayout, index: int, mesh: Mesh, strategy: Strategy, ranks: Sequence[int], path: Moves | None = None
) -> dict[int, Settled]:
    """One buffer of a unit on each of the ranks; ``path`` replaces the row's moves."""
    moved = moves(strategy, mesh, unit.axes) if path is None else path
    return {rank: settle(unit, index, mesh, strategy, moved, rank) for rank in ranks}
