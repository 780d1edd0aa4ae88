"""The tensor axis seen from one rank, and the three ways in which an activation travels over it.

    sum        a share of a sum on each rank      -> the whole sum on each        all_reduce
    scatter    a share of a sum on each rank      -> the sum, cut in time         reduce_scatter
    gather     a piece on each rank               -> the whole on each            all_gather

Under sequence parallelism the stream between the products is cut in *time*, dim 1 of [batch, time, width]: a sum is
scattered and a stream gathered, which is the same volume as one all_reduce.  Collectives need equal pieces end to end,
so a dim other than the first costs one copy, and 5 steps of time over 4 ranks travel as 4 pieces of 2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.padded import Finish, start_gather, start_scatter
from plait.table.collectives import Note
from plait.table.region import part
from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor.no_double_backward import no_double_backward

AXES = ("tensor",)
NOTHING = torch.Size()
Later = list[Callable[[], Tensor]]
"""Gradients of one parameter that are yet to be computed, in the order in which a backward adds them."""

first_order = no_double_backward("a tensor-parallel layer", "train such a model without the tensor axis")


class TensorAxis:
    """This rank's place on the tensor axis, and the state of the running microbatch.

    ``sequence``: the stream between the products is cut in time.
    """

    microbatch = -1
    """The number of the running microbatch, for the ledger."""
    length = 0
    """Steps of time of the whole stream in this forward, set where it is first cut."""
    entered: Any = None
    """The input that the next sibling may share (see ``linear``)."""
    whole_logits = False
    """True if the model computes its own loss from the logits of the whole vocabulary."""
    unsplit = False
    """True inside a module whose activations are whole in time, though the stream is not."""
    running = True
    """True while a forward of the model, or its loss, is under way."""

    def __init__(self, comm: Comm, *, sequence: bool) -> None:
        self.comm, self.sequence = comm, sequence
        self.ways, self.index = comm.mesh.tensor, comm.mesh.index(comm.rank, AXES)

    def left(self, width: int, shape: torch.Size = NOTHING, *, fused: bool = False) -> None:
        """Notes that the next activation has ``width`` features, and that this rank has those of ``shape``; 0: all."""

    def later(self, parameter: Tensor) -> Later | None:
        """Returns the list where a parameter's gradients wait for their own pass; None: they are computed at once."""
        return None

    def part(self, size: int, index: int | None = None) -> tuple[int, int]:
        """The begin and end of a rank's part of ``size``; this rank's by default."""
        return part(size, self.ways, self.index if index is None else index)

    def lengths(self, size: int) -> list[int]:
        """The lengths of all ranks' parts of ``size``."""
        return [len(range(*self.part(size, index))) for index in range(self.ways)]

    def check_stream(self, x: Tensor, site: str, *, whole: bool) -> None:
        """Raises ValueError if a stream no longer has the length at which it left the embedding: code sliced it."""
        steps = self.length if whole else self.lengths(self.length)[self.index]
        if x.dim() < 3 or x.size(1) != steps:
            raise ValueError(
                f"{site!r} gets {list(x.shape)} under sequence parallelism, where rank {self.index} of the tensor axis "
                f"works on {steps} of {self.length} steps of [batch, time, width]: something before it cut the stream "
                f"in time itself, or gathered it (an 'enter' around it: say 'unsplit' there); else leave sequence "
                f"parallelism out for such a call"
            )

    def note(self, phase: str, site: str) -> Note:
        return Note(phase, site, self.microbatch)

    def start_sum(self, x: Tensor, note: Note) -> Finish:
        """Issues the sum of ``x`` over the ranks, in place where ``x`` is contiguous."""
        x = x.contiguous()
        work = self.comm.all_reduce(x, AXES, note=note)

        def finish() -> Tensor:
            work.wait()
            return x

        return finish

    def start_scatter(self, x: Tensor, note: Note) -> Finish:
        """Issues the sum of ``x`` [batch, time, ...] over the ranks; this rank gets its part in time."""
        return start_scatter(self.comm, x, 1, self.lengths(x.size(1)), AXES, note)

    def start_gather(self, x: Tensor, dim: int, size: int, note: Note) -> Finish:
        """Issues the gathering of all ranks' parts along ``dim``, ``size`` together."""
        return self.start_gather_of(x, dim, self.lengths(size), note)

    def start_gather_of(self, x: Tensor, dim: int, lengths: Sequence[int], note: Note) -> Finish:
        """Issues the gathering of parts of these lengths along ``dim``."""
        return start_gather(self.comm, x, dim, lengths, AXES, note)


class Leave(torch.autograd.Function):
    """Turns a share of a sum on each rank into the whole stream: summed, or summed and scattered in time.

    Backward: nothing (the gradient is whole on every rank already), or a gather.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, site: str, scatter: bool) -> Tensor:
        ctx.axis, ctx.site, ctx.length = axis, site, x.size(1) if scatter else 0
        return (axis.start_scatter if scatter else axis.start_sum)(x, axis.note(FORWARD, site))()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        axis: TensorAxis = ctx.axis
        if ctx.length:
            gradient = axis.start_gather(gradient, 1, ctx.length, axis.note(BACKWARD, ctx.site))()
        return gradient, None, None, None


class Divide(torch.autograd.Function):
    """Cuts a whole activation in a dim; backward gathers it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, site: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.site, ctx.size = axis, dim, site, x.size(dim)
        start, stop = axis.part(ctx.size)
        return x.narrow(dim, start, stop - start)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        axis: TensorAxis = ctx.axis
        return axis.start_gather(gradient, ctx.dim, ctx.size, axis.note(BACKWARD, ctx.site))(), None, None, None


class Gather(torch.autograd.Function):
    """Turns pieces of a dim into the whole; backward keeps this rank's piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, size: int, site: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, size
        return axis.start_gather(x, dim, size, axis.note(FORWARD, site))()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        start, stop = ctx.axis.part(ctx.size)
        return gradient.narrow(ctx.dim, start, stop - start), None, None, None, None
