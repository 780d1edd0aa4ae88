"""One flat buffer of a unit on this rank, and this rank's pieces of it.

full     every element; parameters are views of it, so a gather copies nothing per parameter.  If the row splits them,
         it has memory only while they are gathered: resharding resizes its storage to nothing and unsharding back, so
         the tensors that autograd saved (parameters, or views such as ``weight.t()``) have the right values again
common   if the ranks of a host share memory, ``full`` exists once for all of them, and ``rest`` is a part of it: a
         gather moves nothing.  No rank updates its piece before all ranks have agreed that the step's reads are over
rest     this rank's piece of the parameters at rest; if nothing is split, it is ``full``
kept     from a forward to its backward: the piece that the next gather starts from
master   the piece that the optimizer updates, if its cell has another dtype or device than the parameters' cell;
         parameters are rounded from it after each update.  Otherwise the optimizer updates a part of ``rest``
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.comm import Comm, Work
from plait.comm.operation import Alone, Prepared, start
from plait.forward.parameter import AtRest, as_class
from plait.table.cells import DENSE, LONG, Cell, StateAxes, Strategy, moves
from plait.table.collectives import Note
from plait.table.flat import FlatLayout
from plait.table.tensor_cut import TensorCut
from plait.torch_private import DisableTorchFunction
from plait.zero.transfers import move_by_move, prepare

MOST_GATHERS = 64
"""The most gathers of a flat buffer that stay prepared (phases times microbatches)."""


def dtype_in(cell: Cell, own: torch.dtype) -> torch.dtype:
    """The dtype that a cell gives to the state of parameters of dtype ``own``; integer dtypes stay."""
    if not (cell.dtype and own.is_floating_point):
        return own
    dtype: torch.dtype = getattr(torch, LONG[cell.dtype])
    return dtype


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The value that a parameter shows while it is not gathered: NaN, or the smallest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)


class Flat:
    """Parameters of a unit that share one dtype, and all train or are all frozen.

    Args:
        cuts: the cut of each parameter over the tensor axis; None if it is whole.
        summed: True if gradients are pending over the tensor axis.
        axes: the axes over which its state is split.
        tied: True if other stages use its parameter too, and exchange its gradient.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        strategy: Strategy,
        comm: Comm,
        cuts: Sequence[TensorCut | None],
        summed: bool,
        axes: StateAxes = DENSE,
        tied: bool = False,
    ) -> None:
        device, own = comm.device, parameters[0].dtype
        self.cuts, self.summed, self.axes, self.tied = list(cuts), summed, axes, tied
        self.tensor_rank = comm.mesh.index(comm.rank, axes.cut)
        """This rank's index among those that share cut parameters."""
        self.layout, self.parameters, self.comm = layout, list(parameters), comm
        self.trainable = self.parameters[0].requires_grad
        self.dtype = dtype_in(strategy.params, own)
        self.sum_dtype, update_dtype = dtype_in(strategy.grads, self.dtype), dtype_in(strategy.optim, self.dtype)
        narrowest = min(self.sum_dtype.itemsize, update_dtype.itemsize)
        if self.trainable and not strategy.params.dtype and narrowest < own.itemsize:
            raise ValueError(
                f"the row {strategy.name!r} ({strategy.row()}) would sum or update parameters of {str(own)[6:]} in "
                f"fewer bits: leave out its dtypes, or give the parameters one"
            )
        cells = (strategy.params, strategy.kept, strategy.grads, strategy.optim)
        self.rest_place, self.kept_place, self.grads_place, self.optim_place = map(self.place, cells)
        rest_ways, kept_ways, grads_ways, _ = (comm.mesh.count(axes.of(cell.split)) for cell in cells)
        self.split, self.keeps_more, self.grads_split = rest_ways > 1, kept_ways != rest_ways, grads_ways > 1
        start, stop = self.optim_place
        self.common = comm.common(layout.numel, self.dtype, axes.of(strategy.params.split)) if self.split else None
        """Every element, once for all ranks of a host: each rank updates its piece, and nothing has to be gathered."""
        if self.common is None:
            self.rest = comm.empty(self.rest_place[1] - self.rest_place[0], self.dtype).zero_()
            self.full = torch.empty(layout.numel, dtype=self.dtype, device=device) if self.split else self.rest
        else:
            self.full, self.rest = self.common, self.common[slice(*self.rest_place)]
        self.updated_at_rest = self.rest[start - self.rest_place[0] : stop - self.rest_place[0]]
        """The part of ``rest`` that the optimizer updates, or that is rounded from the master weights."""
        self.master: Tensor | None = None
        if self.trainable and layout.has_master(strategy):
            self.master = torch.zeros(stop - start, dtype=update_dtype, device=strategy.optim.device or device)
        self.updated = self.updated_at_rest if self.master is None else self.master
        """The piece that the optimizer updates, in place."""
        self.bytes_full = layout.numel * self.dtype.itemsize
        self.kept: Tensor | None = None
        self._in_place = False  # True once the parameters have ``_views``, if they keep them at rest: in common memory
        self._point_views()
        path = moves(strategy, comm.mesh, axes)
        self._forward, self._backward, self._publish = (
            move_by_move(part, layout, comm) for part in (path.forward, path.backward, path.publish)
        )
        nothing = placeholder(self.dtype, device)
        self._placeholders = [nothing.expand(s.shape) for s in layout.slots]
        self._here = [type(p) for p in self.parameters]
        self._at_rest = [as_class(AtRest, kind) for kind in self._here]
        if self.split:
            for parameter, slot in zip(self.parameters, layout.slots, strict=True):
                parameter.resting_name = slot.name  # type: ignore[attr-defined]
        (self.reshard if self.split else self.show)()

    def place(self, cell: Cell) -> tuple[int, int]:
        """The elements of the flat buffer that this rank has under a cell, as (start, stop)."""
        mesh, axes = self.comm.mesh, self.axes.of(cell.split)
        return self.layout.piece(mesh.count(axes), mesh.index(self.comm.rank, axes))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Every parameter as a view of a whole flat buffer."""
        return [buffer[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]

    @property
    def published(self) -> bool:
        """True if forwards, here or on other ranks, read a copy of the elements that the optimizer updates."""
        return self.master is not None or any(self._publish)

    def publish(self, note: Note) -> list[Work]:
        """Starts, after an update, to send the updated pieces, rounded, to every rank that has them at rest."""
        if self.master is not None:
            self.updated_at_rest.copy_(self.master)
        first = self.rest_place[0]
        return start([[prepare(self.comm, m, self.rest, first, note) for m in move] for move in self._publish])

    def unshard(self, phase: str, unit: str, microbatch: int, *, own: bool) -> list[Work]:
        """Gives ``full`` its memory and issues the messages that fill it from the kept piece or the piece at rest.

        ``own``: use this rank's private memory, for readers that write to it or keep a view.
        """
        if self.common is None:
            self.full.untyped_storage().resize_(self.bytes_full)
        elif own:
            self._renew()
        if self.kept is None:
            (first, last), piece, path = self.rest_place, self.rest, self._forward
        else:
            (first, last), piece, path = self.kept_place, self.kept, self._backward
        key = phase, microbatch, self.kept is None
        found = self._gathers.get(key)
        if found is None:
            if len(self._gathers) >= MOST_GATHERS:
                self._gathers.clear()
            note = Note(phase, unit, microbatch)
            gathers = [[prepare(self.comm, message, self.full, 0, note) for message in move] for move in path]
            found = self._gathers[key] = self.full[first:last], gathers
        own_piece, gathers = found
        if self.full is not self.common:
            own_piece.copy_(piece)
        return start(gathers)

    def own(self) -> None:
        """Moves gathered values into this rank's private memory, for readers that write to ``full`` or keep a view."""
        if self.common is not None and self.full is self.common:
            self._renew()
            self.full.copy_(self.common)
            self.show()

    def show(self) -> None:
        """Points the parameters at ``full``."""
        with DisableTorchFunction():
            for parameter, view, here in zip(self.parameters, self._views, self._here, strict=True):
                parameter.__class__ = here  # the user's own: see docs/guide/your-own-loop.md
                if not self._in_place:
                    parameter.data = view
        self._in_place = self.common is not None

    def reshard(self, *, leave: bool = False) -> None:
        """Points the parameters at placeholders and gives the memory of ``full`` back; common memory stays.  ``leave``:
        a program may keep views of it, so the next gather gets new memory."""
        if self.common is not None and self.full is not self.common:  # the copy is left to its holders
            self.full = self.common
            self._point_views()
        values = self._placeholders if self.common is None else self._views
        with DisableTorchFunction():
            for parameter, value, at_rest in zip(self.parameters, values, self._at_rest, strict=True):
                if not self._in_place:
                    parameter.data = value
                parameter.__class__ = at_rest
        self._in_place = self.common is not None
        if self._in_place:
            return
        if leave or not self.full.untyped_storage().resizable():  # numpy shares it
            self._renew()
        self.full.untyped_storage().resize_(0)

    def replaced(self) -> list[str]:
        """The names of parameters whose ``p.data`` is not the engine's memory."""
        with DisableTorchFunction():
            rows = zip(self.parameters, self._views, self.layout.slots, strict=True)
            return [slot.name for parameter, view, slot in rows if not parameter.is_set_to(view)]

    def contains(self, pointer: int) -> bool:
        """True if an address is in the memory of the gathered parameters."""
        return 0 <= pointer - self.full.data_ptr() < self.bytes_full

    def _renew(self) -> None:
        """Leaves the memory to its other holders: the next gather gets new memory."""
        self.full = torch.empty_like(self.full)
        self._point_views()

    def _point_views(self) -> None:
        self._gathers: dict[tuple[str, int, bool], tuple[Tensor, list[list[Prepared | Alone]]]] = {}
        """Prepared gathers of ``full``: this rank's part of it and the messages, by phase and microbatch."""
        self._views = self.views(self.full)
        self._in_place = False

    def keep(self) -> None:
        """Keeps the row's part between forward and backward; it is a copy only if it is more than the piece at rest."""
        if self.kept is None:
            self.kept = self.full[slice(*self.kept_place)] if self.keeps_more else self.rest
            if self.keeps_more and self.common is None:
                self.kept = self.kept.clone()
