"""A weight that several stages use: one copy on each, whose gradients are summed once per step.

    stage 0   embed.weight   Σ over microbatches, then over the data axes ──┐
                                                                            ├─ use 0 + use 1, on both
    stage 3   head.weight    Σ over microbatches, then over the data axes ──┘

Each stage accumulates and reduces its own uses under the row, like any other gradient.  Then the ranks that own the
same piece exchange it, add in the order of stages and make the same update, so the copies stay equal to the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.schedule.actions import TIED
from plait.table.collectives import Note
from plait.zero.flat_gradient import FlatGradient
from plait.zero.state.identity import some_elements


@dataclass(frozen=True)
class TiedWeight:
    """A parameter that several stages use."""

    name: str
    stages: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...] = ()
    """For each stage, the names under which the whole model has the parameter there."""


class TiedWeights:
    """The edges that touch this rank, in the order of the model's parameters; ``gradients`` go by (name, stage)."""

    def __init__(
        self,
        edges: Sequence[TiedWeight],
        comm: Comm,
        gradients: Mapping[tuple[str, int], FlatGradient],
        rank_of: Mapping[int, int],
    ) -> None:
        self.edges, self.comm, self.gradients, self.rank_of = edges, comm, gradients, rank_of
        self.copies = {id(gradients[e.name, s].flat) for e in edges for s in e.stages[1:] if (e.name, s) in gradients}
        """The flat gradients, by ``id``, of all copies but the first: the norm counts a weight once."""

    def add_uses(self) -> None:
        """Sums the uses of every tied weight; each gradient is already in the optimizer's cell."""
        for edge in self.edges:
            mine = self._owned(edge)
            if not any(piece.numel() for piece in mine.values()):
                continue
            note, like = Note(TIED, edge.name), next(iter(mine.values()))
            arriving = {s: torch.empty_like(like) for s in edge.stages if s not in mine}
            works = [self.comm.recv(piece, self.rank_of[s], note) for s, piece in arriving.items()]
            ranks = dict.fromkeys(self.rank_of[s] for s in arriving)
            works += [self.comm.send(piece, rank, note) for piece in mine.values() for rank in ranks]
            for work in works:
                work.wait()
            first, *others = ((mine | arriving)[s] for s in edge.stages)
            total = first.clone()
            for use in others:
                total += use
            for piece in mine.values():
                piece.copy_(total)

    def bytes_owned(self, edge: TiedWeight) -> int:
        """Bytes of a tied gradient that this rank exchanges; 0 if none of its stages is here."""
        return next((piece.nbytes for piece in self._owned(edge).values()), 0)

    def _owned(self, edge: TiedWeight) -> dict[int, Tensor]:
        """This rank's piece of the gradient, on each stage of the weight that is here."""
        return {s: self.gradients[edge.name, s].owned for s in edge.stages if (edge.name, s) in self.gradients}


class FollowingParameter:
    """A stage's copy of a parameter that an earlier stage of the rank has: frozen with it, and written to with it.

    Args:
        whole: the copy has its values at rest.
    """

    def __init__(self, copied: nn.Parameter, user: nn.Parameter, *, whole: bool) -> None:
        self._copied, self._user, self._whole, self._version = copied, user, whole, user._version

    def follow(self) -> None:
        """Copies what a program has changed in the user's parameter since."""
        self._copied.requires_grad_(self._user.requires_grad)
        if self._whole and (self._user._version != self._version or not self._alike()):
            with torch.no_grad():
                self._copied.copy_(self._user)
            self._version = self._user._version

    def _alike(self) -> bool:
        """True if some elements are the same: a write to ``.data`` has no version.  Accelerators are not asked."""
        one, other = some_elements(self._copied), some_elements(self._user)
        return one.device.type != "cpu" or torch.equal(one, other)
