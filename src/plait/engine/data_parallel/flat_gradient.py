"""Where the gradient of one flat buffer lies: the accumulator, and what a microbatch adds to it.

Where the accumulator has every element, gradients go straight into it: the first microbatch's are copied, later ones
added.  Elsewhere they go to a transient buffer, which is reduced to this rank's piece.
"""

import torch
from torch import Tensor

from plait.comm import Comm
from plait.core.cells import Moves
from plait.engine.data_parallel.storage import Flat
from plait.engine.data_parallel.transfers import transfers


class Buffers:
    """Transient gradient buffers, reused: fresh memory costs page faults.

    A larger buffer serves a smaller unit, and a larger one takes the place of one that is too small, so there are never
    more buffers than were in use at once.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._free: list[Tensor] = []
        self._bases: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements, with whatever was in them before."""
        same = sorted((t for t in self._free if t.dtype == dtype), key=Tensor.numel)
        base = next((t for t in same if t.numel() >= numel), same[-1] if same else None)
        self._free = [t for t in self._free if t is not base]
        if base is None or base.numel() < numel:
            base = self._comm.empty(numel, dtype).zero_()
        view = base[:numel]
        self._bases[id(view)] = base
        return view

    def give(self, view: Tensor) -> None:
        """What ``take`` returned is free again."""
        self._free.append(self._bases.pop(id(view)))

    def clear(self) -> None:
        """Give up the memory of those that are free."""
        self._free.clear()

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._free)


class FlatGradient:
    """The gradient of one flat buffer; ``accumulated`` is this rank's piece."""

    def __init__(self, flat: Flat, moves: Moves, comm: Comm, buffers: Buffers) -> None:
        self.flat, self.buffers = flat, buffers
        start, stop = flat.grads_place
        self.direct = not flat.grads_split
        """The accumulator has every element."""
        self.accumulated = comm.empty(stop - start, flat.sum_dtype).zero_()
        self.views = flat.views(self.accumulated) if self.direct else []
        self.transient: Tensor | None = None
        self.touched: set[int] = set()
        """The parameters that got a gradient in this step: zero is a gradient, none is not."""
        self.touched_now: set[int] = set()
        """Those of this microbatch."""
        self.started = False
        """The accumulator has a microbatch's sum."""
        self.claimed = False
        """A reduction writes, or has written, the first one into it."""
        self.microbatch_messages = () if self.direct else transfers(moves.microbatch, flat.layout, comm)

    def name(self, index: int) -> str:
        """A parameter's name."""
        return self.flat.layout.slots[index].name

    def begin_step(self) -> None:
        """Forget the last step's sum (the memory stays)."""
        self.touched.clear()
        self.started = self.claimed = False

    def take(self, index: int, gradient: Tensor) -> None:
        """Move one parameter's gradient into the buffer."""
        if self.direct and index in self.touched:
            self.views[index].add_(gradient)
        else:
            if not self.direct and self.transient is None:
                self.make_transient()
            self.views[index].copy_(gradient)
            self.touched.add(index)
        self.touched_now.add(index)

    @property
    def owned(self) -> Tensor:
        """The elements that this rank's optimizer updates."""
        (start, stop), first = self.flat.optim_place, self.flat.grads_place[0]
        return self.accumulated[start - first : stop - first]

    def make_transient(self) -> Tensor:
        """A buffer for the whole gradient of a microbatch."""
        self.transient = self.buffers.take(self.flat.layout.numel, self.flat.sum_dtype)
        self.views = self.flat.views(self.transient)
        return self.transient

    def hand_over(self) -> tuple[Tensor, Tensor]:
        """The microbatch's whole gradient, zeros where none came, and the piece of it that this rank accumulates.

        The first piece is written straight into the accumulator, where all pieces are alike.
        """
        whole = self.make_transient() if self.transient is None else self.transient
        self.fill_untouched(whole, self.touched_now)
        self.transient, self.views = None, []
        piece = self.accumulated if self.flat.layout.even and not self.claimed else whole[slice(*self.flat.grads_place)]
        self.claimed = True
        return whole, piece

    def accumulate(self, piece: Tensor) -> None:
        """Add a microbatch's sum."""
        if self.started:
            self.accumulated.add_(piece)
        elif piece.data_ptr() != self.accumulated.data_ptr():
            self.accumulated.copy_(piece)
        self.started = True

    def complete(self) -> None:
        """Before the step's own reductions: zeros for what got no gradient on this rank; others may have one."""
        if self.direct:
            self.fill_untouched(self.accumulated, self.touched)
        elif not self.started:
            self.accumulated.zero_()

    def fill_untouched(self, whole: Tensor, touched: set[int]) -> None:
        """Zeros for the parameters that got no gradient."""
        if len(touched) < len(self.flat.parameters):
            for index, slot in enumerate(self.flat.layout.slots):
                if index not in touched:
                    whole[slot.offset : slot.end].zero_()
