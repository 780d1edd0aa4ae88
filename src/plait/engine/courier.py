"""How activations and their gradients go from stage to stage.

    stage 0        leave F ──► SEND_F ─────────► RECV_F ──► fetch F        stage 1, another rank
                   fetch B ◄── RECV_B ◄───────── SEND_B ◄── leave B
    stage 0        leave F ────────────────────────────────► fetch F        stage 1, the same rank

A pass leaves what it made and fetches what it needs; between the two, messages are started where the schedule says so
and never waited for before ``fetch``.  A receive is posted into memory of the right shape as soon as that is known:
what a stage hands over depends on the shapes of the batch alone, so it is learned once for each shape of batch, from
the first message.  A stage that hands over something else for such a batch is refused before it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.comm import Comm, Work
from plait.comm.call import Incoming, name_of
from plait.core.actions import ACTIVATION, GRADIENT, Action, Kind, ends
from plait.core.collectives import Note
from plait.core.receipts import Key

Signature = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors."""


def signature_of(batch: Any) -> Signature:
    """The shapes on which the shapes of activations depend."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


class Courier:
    """Hand-overs of one rank.

    Args:
        owner: the pipe coordinate of each stage.
    """

    def __init__(self, comm: Comm, owner: Mapping[int, int]) -> None:
        self.comm, self.owner = comm, owner
        here = comm.mesh.coordinates(comm.rank)
        self.rank_of = {stage: comm.mesh.rank(**{**here, "pipe": place}) for stage, place in owner.items()}
        self._known: dict[tuple[int, Signature], tuple[tuple[int, ...], torch.dtype]] = {}
        """Shape and dtype of what each stage hands on, by the shapes of the batch."""
        self.signatures: list[Signature] = []
        """Of the microbatches of the step under way."""
        self._left: dict[Key, Tensor] = {}
        self._coming: dict[Key, tuple[Tensor, Work] | Incoming] = {}
        self._agreed: set[tuple[int, Signature]] = set()
        """What was known before this step began: on both sides of a hand-over the same."""
        self._going: dict[Key, Work] = {}
        self._receipts: Mapping[Key, tuple[Key, ...]] = {}

    def begin(self, batches: Sequence[Any], receipts: Mapping[Key, tuple[Key, ...]]) -> None:
        """Before a step.

        Args:
            receipts: by every message that comes, those of ours that have arrived by then.
        """
        self._receipts = receipts
        self._agreed = set(self._known)
        self.signatures = [signature_of(batch) for batch in batches]
        self._left.clear()
        self._coming.clear()
        self._going.clear()

    def leave(self, way: str, stage: int, microbatch: int, tensor: Tensor) -> None:
        """What a stage made for its neighbour: an activation (F) for the next, a gradient (B) for the one before.

        Raises:
            ValueError: an activation of another shape than before for a batch of the same shapes.
        """
        if way == "F":
            self._check(stage, microbatch, tensor)
        self._left[way, stage + (1 if way == "F" else -1), microbatch] = tensor

    def _check(self, stage: int, microbatch: int, tensor: Tensor) -> None:
        made = tuple(tensor.shape), tensor.dtype
        known = self._known.setdefault((stage, self.signatures[microbatch]), made)
        if made != known:
            (now, dtype), (before, other) = made, known
            raise ValueError(
                f"stage {stage} hands over {name_of(dtype)} {list(now)} for microbatch {microbatch}, but for an "
                f"earlier batch of the same shapes it was {name_of(other)} {list(before)}, for which the "
                f"next stage made room: let the output's shape depend on the shapes of the batch only, or pad it"
            )

    def start(self, message: Action) -> None:
        """Start a message, and those joined to it."""
        for part in message.parts:
            way = "F" if part.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
            source, target = ends(part)
            note = Note(ACTIVATION if way == "F" else GRADIENT, f"stage {source}", part.microbatch)
            if part.kind in (Kind.SEND_F, Kind.SEND_B):
                tensor = self._left.pop((way, target, part.microbatch)).contiguous()
                agreed = (min(source, target), self.signatures[part.microbatch]) in self._agreed
                work = self.comm.send(tensor, self.rank_of[target], note, agreed=agreed)
                self._going[way, target, part.microbatch] = work
            else:
                self._coming[way, target, part.microbatch] = self._receive(way, source, target, part.microbatch, note)

    def _receive(
        self, way: str, source: int, target: int, microbatch: int, note: Note
    ) -> tuple[Tensor, Work] | Incoming:
        between = min(source, target), self.signatures[microbatch]  # an activation of this stage, or its gradient
        if between not in self._agreed:
            return self.comm.recv_new(self.rank_of[source], note)
        shape, dtype = self._known[between]
        tensor = torch.empty(shape, dtype=dtype, device=self.comm.device)
        return tensor, self.comm.recv(tensor, self.rank_of[source], note, agreed=True)

    def fetch(self, way: str, stage: int, microbatch: int) -> Tensor:
        """What stage ``stage`` needs from its neighbour; waits for it."""
        key = (way, stage, microbatch)
        if key in self._left:
            return self._left.pop(key)
        coming = self._coming.pop(key)
        if isinstance(coming, tuple):
            tensor, work = coming
            work.wait()
        else:
            tensor = coming.wait()
        if way == "F":
            made = tuple(tensor.shape), tensor.dtype
            self._known[stage - 1, self.signatures[microbatch]] = made
        for sent in self._receipts.get(key, ()):
            self._going.pop(sent).wait()  # it has arrived
        return tensor

    def settle(self) -> None:
        """After a step: nothing of ours is under way any more."""
        for work in self._going.values():
            work.wait()
        self._going.clear()
