"""Gradients that are neither added to nor reduced: autograd's own tensors become the sums, without a copy.

    first microbatch     p.grad ──► the optimizer's .grad
    a second one comes   p.grad ──► copied to the accumulator, which has memory from now on; later gradients are added

So one process with one microbatch has the memory and the passes of a plain loop.  The memory of adopted gradients is
freed when the next step begins.
"""

from functools import cached_property

from torch import Tensor

from plait.comm import Comm
from plait.table.cells import Moves
from plait.table.flat import Run
from plait.torch_private import storage_use_count
from plait.zero.flat_gradient import Buffers, FlatGradient, view_of
from plait.zero.storage import Flat

LEAST = 1 << 14
"""The mean number of elements per parameter from which on gradients are adopted: copying smaller ones costs less than
checking each tensor by itself."""


def gradient_of(flat: Flat, moves: Moves, comm: Comm, buffers: Buffers) -> FlatGradient:
    """The gradient of a flat buffer; one that adopts if no message of the row changes it."""
    path = (*moves.microbatch, *moves.step, *(moves.summed if flat.summed else ()))
    plain = flat.dtype.is_floating_point and flat.sum_dtype == flat.dtype
    large = flat.layout.numel >= LEAST * len(flat.parameters)
    adopts = plain and large and not flat.grads_split and not any(move.sends(comm.mesh) for move in path)
    return (AdoptedGradient if adopts else FlatGradient)(flat, moves, comm, buffers)


class AdoptedGradient(FlatGradient):
    """The gradient of one flat buffer, as autograd's tensors by parameter until the accumulator has memory."""

    def prepare(self) -> None:
        """Leaves the accumulator without memory."""
        self.adopted: dict[str, Tensor] = {}
        self.adopting = True

    @cached_property
    def accumulated(self) -> Tensor:  # type: ignore[override]
        """The accumulator.  The first read gives it memory and the adopted gradients, and ends adoption."""
        super().prepare()
        self.adopting = False
        for view, slot in zip(self.views, self.flat.layout.slots, strict=True):
            if (gradient := self.adopted.pop(slot.name, None)) is not None:
                view.copy_(gradient)
        for piece in self.pieces:
            piece.gradient = view_of(piece.run, self.owned)
        memory: Tensor = vars(self)["accumulated"]
        return memory

    def begin_step(self) -> None:
        """Forgets the last step's sum, and frees the adopted gradients."""
        super().begin_step()
        if self.adopting:
            self.adopted.clear()
            for piece in self.pieces:
                piece.view.grad, piece.gradient = None, self.piece(piece.run)

    def take(self, index: int, gradient: Tensor) -> None:
        """Adopts one parameter's gradient, or moves it into the accumulator, with those adopted before."""
        if not self.adopting:
            super().take(index, gradient)
        elif index not in self.touched and self._is_alone(gradient):
            self.adopted[self.name(index)] = gradient
            self.touched.add(index)
            self.touched_now.add(index)
        else:
            self.accumulated  # noqa: B018
            super().take(index, gradient)

    def _is_alone(self, gradient: Tensor) -> bool:
        """True for a plain tensor that does not share its memory.

        Another parameter or an input may have a view of the same memory, and a hook of the program may keep one.
        """
        if type(gradient) is not Tensor or gradient.dtype != self.flat.dtype or not gradient.is_contiguous():
            return False
        memory = gradient.untyped_storage()
        users = storage_use_count(memory._cdata)  # ``gradient`` and ``memory`` are two
        return users == 2 and memory.resizable() and memory.nbytes() == gradient.nbytes

    def sums(self) -> list[Tensor]:
        """The adopted gradients, or the accumulator."""
        return list(self.adopted.values()) if self.adopting else super().sums()

    def piece(self, run: Run) -> Tensor:
        """An empty tensor until the step's gradients have come."""
        return self.flat.rest.new_empty(0)

    def fill_missing(self) -> None:
        """Hands the adopted gradients to the optimizer's pieces, zeros for missing ones."""
        if not self.adopting:
            super().fill_missing()
            return
        for piece in self.pieces:
            if piece.name not in self.adopted:
                self.adopted[piece.name] = self.flat.rest.new_zeros(piece.run.slot.shape)
            piece.gradient = self.adopted[piece.name]
