"""What is claimed of a layout, and what refutes it.

sums        an update's gradient has every sample of every data rank once, added in the row's order
owners      every element has one owner in each group over which the optimizer's cell is cut, is updated once,
            and published to whoever has it at rest
reads       every pass reads the values that were published last
messages    everyone in a collective means the same, every send is received, nobody waits for ever
memory      the fullest rank has room
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.referee.prove.program import Key, Settled
from plait.schedule.actions import Action
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class Counterexample:
    """Where a layout is not the run of a single process."""

    what: str
    """Which of the claims fails: ``sums``, ``owners``, ``reads``, ``messages`` or ``memory``."""
    text: str
    rank: int = -1
    step: int = 0
    parameter: str = ""
    element: int = -1
    """Of the flat buffer of its unit; -1 where it is not about one."""
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
    """Who takes part, and what is due."""

    mesh: Mesh
    flats: Mapping[int, Mapping[Key, Settled]]
    """By rank: the buffers that it works on."""
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
    """By rank: those that a step makes."""
    sums: bool = True
    """Whether gradients are carried out."""
    values: bool = True
    """Whether reads are."""
    steps: int = 2
    """How many are carried out."""
    everyone: bool = False
    """Whether all ranks of the mesh are there, so that groups over any axes can meet."""
