"""Gradients of which nothing is sent: autograd's own tensors are the sums, without a copy.

    first microbatch   p.grad ──► the sum          a copy, if something else has its memory
    later ones         autograd adds to it, as in a plain loop
    the step's end     the sum ──► the optimizer's .grad

So one process has the memory and the passes of a plain loop.  The sums are freed when the next step begins.
"""

from torch import Tensor

from plait.comm import Comm
from plait.table.cells import Moves
from plait.table.flat import Run
from plait.torch_private import storage_use_count
from plait.zero.flat_gradient import Buffers, FlatGradient
from plait.zero.storage import Flat

LEAST = 1 << 14
"""The mean number of elements per parameter from which on gradients are adopted: copying smaller ones costs less than
checking each tensor by itself."""


def gradient_of(flat: Flat, moves: Moves, comm: Comm, buffers: Buffers) -> FlatGradient:
    """The gradient of a flat buffer; one that adopts if no message changes it."""
    path = (*moves.microbatch, *moves.step, *(moves.summed if flat.summed else ()))
    plain = flat.dtype.is_floating_point and flat.sum_dtype == flat.dtype and not flat.tied
    large = flat.layout.numel >= LEAST * len(flat.parameters)
    adopts = plain and large and not flat.grads_split and not any(move.sends(comm.mesh) for move in path)
    return (AdoptedGradient if adopts else FlatGradient)(flat, moves, comm, buffers)


class AdoptedGradient(FlatGradient):
    """The gradient of one flat buffer, as autograd's tensors by parameter; there is no accumulator."""

    adopting = True

    def prepare(self) -> None:
        self.adopted: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Frees the last step's sums."""
        super().begin_step()
        self.adopted.clear()
        for piece in self.pieces:
            piece.view.grad, piece.gradient = None, self.piece(piece.run)

    def take(self, index: int, gradient: Tensor) -> None:
        """Adopts one parameter's gradient, or adds it to the one adopted before."""
        if index in self.touched:
            self.sum_of(index).add_(gradient)
        elif self._is_alone(gradient):
            self.adopted[self.name(index)] = gradient
        else:
            shape = self.flat.layout.slots[index].shape
            self.adopted[self.name(index)] = self.flat.rest.new_empty(shape).copy_(gradient)
        self.touched.add(index)
        self.touched_now.add(index)

    def sum_of(self, index: int) -> Tensor:
        return self.adopted[self.name(index)]

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
        """The adopted gradients."""
        return list(self.adopted.values())

    def piece(self, run: Run) -> Tensor:
        """An empty tensor until the step's gradients have come."""
        return self.flat.rest.new_empty(0)

    def fill_missing(self) -> None:
        """Hands the adopted gradients to the optimizer's pieces, zeros for missing ones."""
        for piece in self.pieces:
            if piece.name not in self.adopted:
                self.adopted[piece.name] = self.flat.rest.new_zeros(piece.run.slot.shape)
            piece.gradient = self.adopted[piece.name]
