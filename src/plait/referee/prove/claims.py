"""The claims about a layout, and the counterexamples that refute them.

sums        an update's gradient has every sample of every data rank once, added in the row's order
owners      every element has one owner in each group over which the optimizer's cell is cut, is updated once,
            and published to every rank that has it at rest
reads       every pass reads the values that were published last
messages    all members of a collective mean the same, every send is received, no rank waits for ever
memory      the fullest rank has room
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.referee.prove.program import Key, Settled
from plait.schedule.actions import Action
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class Counterexample:
    """The place where a layout differs from the run of a single process."""

    what: str
    """The claim that fails: ``sums``, ``owners``, ``reads``, ``messages`` or ``memory``."""
    text: str
    rank: int = -1
    step: int = 0
    parameter: str = ""
    element: int = -1
    """The element of its unit's flat buffer; -1 where it is not about one."""
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
    """The ranks that take part, and the sums and reads that are due."""

    mesh: Mesh
    flats: Mapping[int, Mapping[Key, Settled]]
    """The buffers that each rank works on, by rank."""
    owned_by: tuple[str, ...]
    """The axes over which the optimizer's cell is cut."""
    due: Mapping[Key, int]
    """The sum of each buffer's gradient."""
    stages: int
    owner: Mapping[int, int]
    """The pipe coordinate of each stage."""
    reads: Mapping[Key, frozenset[tuple[str, int]]]
    """Pass and microbatch of every read that a step makes of a buffer."""
    passes: Mapping[int, frozenset[Action]]
    """The passes that a step makes, by rank."""
    sums: bool = True
    """True if gradients are carried out."""
    values: bool = True
    """True if reads are carried out."""
    steps: int = 2
    """The number of steps that are carried out."""
    everyone: bool = False
    """True if all ranks of the mesh are there, so that groups over any axes can meet."""
