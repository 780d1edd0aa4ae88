"""Any model as a chain of links, for planning: an ``nn.Sequential`` by its modules, another model by its units.

Numbers are for one sample and in elements, because the dtype belongs to the plan.  There is no tensor axis: it is not
known how a module's products could be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plait.table.mesh import Mesh


class ChainLink(NamedTuple):
    """One link's forward for a sample."""

    name: str
    parameters: int
    flops: float
    """FLOPs of its products."""
    moved: float
    """Elements that its other operators read and write."""
    kept: float
    """Elements that it keeps for its backward."""
    handed: float
    """Elements that it passes to the next link."""
    operators: int


@dataclass(frozen=True)
class Chain:
    """A model that runs its links one after the other."""

    links: tuple[ChainLink, ...]
    cuts: bool
    """True if a pipeline may cut it between any two links."""

    experts = longest = 0
    tied = dropout = False

    @property
    def most_stages(self) -> int:
        return len(self.links) if self.cuts else 1

    @property
    def num_parameters(self) -> int:
        return sum(link.parameters for link in self.links)

    def uncut(self, tensor: int) -> str | None:
        """The reason why a tensor axis cannot cut the model; None if it can."""
        return None if tensor == 1 else f"tensor={tensor}: a job says nothing of how products are cut: leave tensor out"

    def unshared(self, mesh: Mesh) -> str | None:
        """The reason why the ranks of a mesh cannot share the model's experts; None if they can."""
        return f"expert={mesh.expert}: a job says nothing of its experts: leave expert out" if mesh.expert > 1 else None

    def flops(self, length: int) -> float:
        """Model FLOPs of a sample, forward and backward, divided by the tokens that it counts as."""
        return 3 * sum(link.flops for link in self.links) / length
