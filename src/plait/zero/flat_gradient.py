"""The memory of one flat buffer's gradient: the accumulator, and the buffer of one microbatch.

If the accumulator has every element, gradients go straight into it: the first microbatch's are copied, later ones
added.  If nothing is sent either, there is no accumulator (see ``adopted``).  Otherwise gradients go to a transient
buffer, which is reduced to this rank's piece.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm, Work
from plait.table.cells import Moves
from plait.table.collectives import Note
from plait.table.flat import Run, lower
from plait.zero.storage import Flat
from plait.zero.transfers import prepare

MOST_MADE = 1024
"""The most views and messages that are cached with a buffer, over the units and microbatches that use it in turn."""


class Buffers:
    """Transient gradient buffers, reused: fresh memory costs page faults.

    A larger buffer serves a smaller unit.  A larger buffer also replaces one that is too small, so there are never more
    buffers than were in use at once.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._free: list[Buffer] = []  # the smallest first
        self._used: dict[int, Buffer] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Takes ``numel`` elements, with arbitrary values."""
        fitting = [b for b in self._free if b.base.dtype == dtype]
        free = next((b for b in fitting if b.numel >= numel), fitting[-1] if fitting else None)
        if free is not None:
            self._free.remove(free)
        if free is None or free.numel < numel:
            free = Buffer(self.comm.empty(numel, dtype).zero_())
        view = free.view(numel)
        self._used[id(view)] = free
        return view

    def give(self, view: Tensor) -> None:
        """Frees a view that ``take`` returned."""
        insort(self._free, self._used.pop(id(view)), key=attrgetter("numel"))

    def made_on(self, view: Tensor) -> dict[Hashable, Any]:
        """The views and messages made on a view that ``take`` returned; they are found again with the same memory."""
        return self._used[id(view)].made

    def clear(self) -> None:
        """Gives up the memory of the free buffers."""
        self._free.clear()

    @property
    def bytes(self) -> int:
        return sum(buffer.base.nbytes for buffer in self._free)


class Buffer:
    """The memory of one buffer, and the objects made on it: views of its first elements, messages."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.numel = base, base.numel()
        self.made: dict[Hashable, Any] = {}

    def view(self, numel: int) -> Tensor:
        """Its first ``numel`` elements: the same tensor each time."""
        if numel not in self.made:
            self.made[numel] = self.base[:numel]
        found: Tensor = self.made[numel]
        return found


def view_of(run: Run, memory: Tensor) -> Tensor:
    """Returns a run of a flat piece, in the parameter's shape if the run is the whole parameter."""
    part = memory[run.offset : run.offset + run.numel]
    return part.view(run.slot.shape) if run.whole else part


class FlatGradient:
    """The gradient of one flat buffer; ``accumulated`` is this rank's part of the sum: all of it, or a piece."""

    adopting = False
    """True if autograd's own tensors are the sums (see ``adopted``)."""

    def __init__(self, flat: Flat, moves: Moves, comm: Comm, buffers: Buffers) -> None:
        self.flat, self.buffers = flat, buffers
        self.numel = flat.layout.numel
        self.direct = not flat.grads_split
        """True if the accumulator has every element."""
        self.pieces: list[Any] = []
        """The pieces of these parameters that the optimizer updates (``owned.Owned``)."""
        self.prepare()
        self.transient: Tensor | None = None
        self.touched: set[int] = set()
        """The parameters that got a gradient in this step: a zero gradient counts, a missing one does not."""
        self.touched_now: set[int] = set()
        """The parameters that got a gradient in this microbatch."""
        self.started = False
        """True once the accumulator has a microbatch's sum."""
        self.claimed = False
        """True once a reduction writes, or has written, the first sum into the accumulator."""
        path = () if self.direct else moves.microbatch
        self.microbatch_messages = [lower(move, flat.layout, comm.mesh, comm.rank) for move in path]
        """The messages of a microbatch, by move."""

    def prepare(self) -> None:
        """Gives the accumulator memory."""
        start, stop = self.flat.grads_place
        self.accumulated = self.buffers.comm.empty(stop - start, self.flat.sum_dtype).zero_()
        self.views = self.flat.views(self.accumulated) if self.direct else []

    def name(self, index: int) -> str:
        """A parameter's name."""
        return self.flat.layout.slots[index].name

    def begin_step(self) -> None:
        """Forgets the last step's sum (the memory stays)."""
        self.touched.clear()
        self.started = self.claimed = False

    def take(self, index: int, gradient: Tensor) -> None:
        """Moves one parameter's gradient into the buffer."""
        if self.direct and index in self.touched:
            self.views[index].add_(gradient)
        else:
            if not self.direct and self.transient is None:
                self.make_transient()
            self.views[index].copy_(gradient)
            self.touched.add(index)
        self.touched_now.add(index)

    def sum_of(self, index: int) -> Tensor:
        """The sum of a parameter that has begun, to which autograd may add."""
        return self.views[index]

    def sums(self) -> list[Tensor]:
        """The memory of the sum over the microbatches."""
        return [self.accumulated]

    def piece(self, run: Run) -> Tensor:
        """The sum of a run that the optimizer updates."""
        return view_of(run, self.owned)

    @property
    def owned(self) -> Tensor:
        """The elements that this rank's optimizer updates."""
        (start, stop), first = self.flat.optim_place, self.flat.grads_place[0]
        return self.accumulated[start - first : stop - first]

    def make_transient(self) -> Tensor:
        """Takes a buffer for a microbatch's whole gradient."""
        self.transient = self.buffers.take(self.numel, self.flat.sum_dtype)
        made = self.buffers.made_on(self.transient)
        if (self, "views") not in made:
            made[self, "views"] = self.flat.views(self.transient)
        self.views = made[self, "views"]
        return self.transient

    def start_move(self, number: int, whole: Tensor, piece: Tensor, unit: str, microbatch: int) -> list[Work]:
        """Starts move ``number`` on the tensors that ``hand_over`` returned; the last move writes ``piece``."""
        out = piece if number == len(self.microbatch_messages) - 1 else None
        made, key = self.buffers.made_on(whole), (self, number, microbatch, piece is self.accumulated)
        if key not in made:
            if len(made) >= MOST_MADE:
                made.clear()
            messages, note = self.microbatch_messages[number], Note("microbatch", unit, microbatch)
            made[key] = [prepare(self.buffers.comm, m, whole, 0, note, out=out) for m in messages]
        return [message.start() for message in made[key]]

    def hand_over(self) -> tuple[Tensor, Tensor]:
        """The microbatch's whole gradient, zeros for missing ones, and the piece of it that this rank accumulates.

        The first piece is written straight into the accumulator, if all pieces have the same size.
        """
        whole = self.make_transient() if self.transient is None else self.transient
        self.fill_untouched(whole, self.touched_now)
        self.transient, self.views = None, []
        piece = self.accumulated if self.flat.layout.even and not self.claimed else whole[slice(*self.flat.grads_place)]
        self.claimed = True
        return whole, piece

    def accumulate(self, piece: Tensor) -> None:
        """Adds a microbatch's sum."""
        if self.started:
            self.accumulated.add_(piece)
        elif piece is not self.accumulated:
            self.accumulated.copy_(piece)
        self.started = True

    def fill_missing(self) -> None:
        """Fills in zeros, before the step's own reductions, for parameters without a gradient on this rank."""
        if self.direct:
            self.fill_untouched(self.accumulated, self.touched)
        elif not self.started:
            self.accumulated.zero_()

    def fill_untouched(self, whole: Tensor, touched: set[int]) -> None:
        """Writes zeros for the parameters that got no gradient."""
        if len(touched) < len(self.flat.parameters):
            for index, slot in enumerate(self.flat.layout.slots):
                if index not in touched:
                    whole[slot.offset : slot.end].zero_()
