"""A unit's storage: what is gathered and reduced together, and the few states it can be in.

    at rest      p.data is a NaN placeholder of the right shape; this rank holds ``rest``, its piece
    gathering    ``full`` has memory again, messages are under way into it
    open         p.data are views of ``full``; forward or backward may run

``full`` is one tensor for the life of the unit.  Closing resizes its storage to nothing and opening
resizes it back, so whatever autograd saved (parameters, or views of them such as ``weight.t()``) points at
the right values again.  Nothing is copied per parameter: gathers land in ``full``, parameters are views of it.

Under a row that keeps parameters whole, ``full`` *is* ``rest`` and opening costs nothing.

Where the optimizer's cell has another dtype or device than the parameters', its piece is a copy of its own, ``master``;
the parameters at rest are rounded from it after each update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from plait.comm import Comm, Work
from plait.core.cells import LONG, Cell, Move, Moves, Strategy
from plait.core.collectives import Note
from plait.core.cuts import TensorCut
from plait.core.flat import FlatLayout, Message, UnitLayout, lower
from plait.tensor.parallel.pieces import piece_of


def dtype_in(cell: Cell, own: torch.dtype) -> torch.dtype:
    """The dtype that a cell gives to the state of parameters of dtype ``own``; integers stay what they are."""
    if not (cell.dtype and own.is_floating_point):
        return own
    found: torch.dtype = getattr(torch, LONG[cell.dtype])
    return found


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a parameter reads as while its values are elsewhere: NaN, or of integers the smallest."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    least = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), least, dtype=dtype, device=device)


def send(comm: Comm, message: Message, array: Tensor, base: int, note: Note, out: Tensor | None = None) -> Work:
    """Carry out one message on ``array``, which holds the flat elements from ``base`` on.

    A reduce-scatter writes this rank's piece to ``out``, or in place where it is not given.
    """
    view = array[message.start - base : message.stop - base]
    index = comm.mesh.index(comm.rank, message.axes)
    piece = view.numel() // comm.mesh.count(message.axes)
    own = view[index * piece : (index + 1) * piece]
    match message.kind:
        case "all_gather":
            return comm.all_gather(view, own, message.axes, note=note)
        case "reduce_scatter":
            return comm.reduce_scatter(own if out is None else out, view, message.axes, note=note)
        case "all_reduce":
            return comm.all_reduce(view, message.axes, note=note)
        case "broadcast":
            return comm.broadcast(view, message.axes, message.root, note=note)
        case "reduce":
            return comm.reduce(view, message.axes, message.root, note=note)
    raise AssertionError(f"no way to send {message}")


class Flat:
    """One flat buffer of a unit on this rank: the parameters of one dtype that all train, or all do not.

    Args:
        layout: where the parameters lie.
        parameters: the module's own ``Parameter`` objects, one per slot of the layout.
        strategy: the row whose cells say what this rank holds.
        resting: names, by ``id``, of the parameters that are placeholders now; kept up to date.
        cuts: how each parameter is cut over the tensor axis, None where it is whole.
        summed: its gradients are pending over the tensor axis.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        strategy: Strategy,
        comm: Comm,
        resting: dict[int, str],
        cuts: Sequence[TensorCut | None],
        summed: bool,
    ) -> None:
        device = comm.device
        self.resting, self.cuts, self.summed = resting, list(cuts), summed
        self.layout, self.parameters, self.comm = layout, list(parameters), comm
        self.trainable = self.parameters[0].requires_grad
        self.dtype = dtype_in(strategy.params, self.parameters[0].dtype)
        self.sum_dtype = dtype_in(strategy.grads, self.dtype)
        own, kept = (
            self.parameters[0].dtype,
            min(dtype_in(c, self.dtype).itemsize for c in (strategy.grads, strategy.optim)),
        )
        if self.trainable and not strategy.params.dtype and kept < own.itemsize:
            raise ValueError(
                f"the row {strategy.name!r} ({strategy.row()}) would sum or update parameters of {str(own)[6:]} in "
                f"fewer bits: leave out its dtypes, or give the parameters one"
            )
        self.held = self.place(strategy.params)
        self.kept_place = self.place(strategy.kept)
        self.grads_place = self.place(strategy.grads)
        self.optim_place = self.place(strategy.optim)
        ways = comm.mesh.count
        self.split = ways(strategy.params.split) > 1
        self.keeps_more = ways(strategy.kept.split) != ways(strategy.params.split)
        self.grads_split = ways(strategy.grads.split) > 1
        self.rest = torch.zeros(self.held[1] - self.held[0], dtype=self.dtype, device=device)
        self.master: Tensor | None = None
        """The optimizer's piece, where it is not a part of ``rest``."""
        if self.trainable and layout.has_master(strategy):
            start, stop = self.optim_place
            at = strategy.optim.device or device
            self.master = torch.zeros(stop - start, dtype=dtype_in(strategy.optim, self.dtype), device=at)
        self.full = torch.empty(layout.numel, dtype=self.dtype, device=device) if self.split else self.rest
        self.views = [self.full[s.offset : s.end].view(s.shape) for s in layout.slots]
        nothing = placeholder(self.dtype, device)
        self.placeholders = [nothing.expand(s.shape) for s in layout.slots]
        self.kept: Tensor | None = None
        self.accumulated: Tensor | None = None
        self.release()

    def place(self, cell: Cell) -> tuple[int, int]:
        """Which elements of the flat buffer this rank holds under a cell."""
        mesh = self.comm.mesh
        return self.layout.piece(mesh.count(cell.split), mesh.index(self.comm.rank, cell.split))

    def write(self, slot_index: int, value: Tensor, first_row: int | None = None) -> None:
        """Put what this rank holds at rest of a parameter into place.

        Args:
            value: the whole parameter, or, given ``first_row``, rows of this tensor rank's piece from that row on.
        """
        slot, cut = self.layout.slots[slot_index], self.cuts[slot_index]
        skipped = (first_row or 0) * math.prod(slot.shape[1:])
        if cut is not None and first_row is None:
            value = piece_of(value, cut, self.comm.mesh.index(self.comm.rank, ("tensor",)))
        pieces = [(self.rest, self.held)] + ([(self.master, self.optim_place)] if self.master is not None else [])
        for piece, place in pieces:
            for run in self.layout.runs(*place):
                if run.slot is slot:
                    piece[run.offset : run.offset + run.numel].copy_(
                        value.reshape(-1)[run.start - skipped : run.stop - skipped]
                    )

    @property
    def updated(self) -> Tensor:
        """The piece that the optimizer updates, in place."""
        start, stop = self.optim_place
        return self.rest[start - self.held[0] : stop - self.held[0]] if self.master is None else self.master

    def round_master(self) -> None:
        """After an update: the parameters at rest, of what this rank updates."""
        if self.master is not None:
            start, stop = self.optim_place
            self.rest[start - self.held[0] : stop - self.held[0]].copy_(self.master)

    def gather(self, moves: Sequence[Move], start: Tensor, place: tuple[int, int], note: Note) -> list[Work]:
        """Give ``full`` its memory and issue the messages that fill it from the pieces ``start``."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self.full[slice(*place)].copy_(start)
        mesh, rank = self.comm.mesh, self.comm.rank
        return [send(self.comm, m, self.full, 0, note) for move in moves for m in lower(move, self.layout, mesh, rank)]

    def show(self) -> None:
        """Point the parameters at ``full``."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
            self.resting.pop(id(parameter), None)

    def release(self) -> None:
        if self.split:
            for parameter, placeholder, slot in zip(self.parameters, self.placeholders, self.layout.slots, strict=True):
                parameter.data = placeholder
                self.resting[id(parameter)] = slot.name
            self.full.untyped_storage().resize_(0)
        else:
            self.show()

    def keep(self) -> None:
        """Remember what the row keeps between forward and backward, if that is more than lies at rest."""
        if self.kept is None and self.keeps_more:
            self.kept = self.full[slice(*self.kept_place)].clone()

    def forget(self) -> None:
        """Drop what was kept."""
        self.kept = None


class Unit:
    """A module whose parameters are gathered and reduced together.

    Args:
        name: the module's name in the model (``""`` is the model itself, shown as ``root``).
        module: the module whose forward opens the unit.
        flats: the storages of the parameters laid here.
        moves: the collectives of the row.
    """

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat], moves: Moves, comm: Comm) -> None:
        self.name = name or "root"
        self.module, self.flats, self.moves, self.comm = module, list(flats), moves, comm
        self.needs: list[Unit] = [self]
        """The units whose parameters this module reads: itself, and the owners of tied parameters."""
        self.ancestors: set[str] = set()
        self.users = 0
        self.works: list[Work] | None = None
        """Messages of a gather under way; None when none is."""
        self.publishing: list[Work] = []
        self.keeps_open = not moves.backward
        """The row keeps full parameters from forward to backward."""
        self.has_kept = False
        """Between a first use and the end of backward: gathers start from what the row keeps."""
        self.split = any(flat.split for flat in self.flats)
        self.trains = any(flat.trainable for flat in self.flats)
        self.filled = not self.split

    @property
    def done_with_gradients(self) -> bool:
        """Whether nothing reads the unit's parameters once its own have their gradients.

        So it is for a unit of trainable parameters only: autograd makes a weight's gradient in the same node as that of
        its input.  Frozen and borrowed parameters may be read later.
        """
        return all(flat.trainable for flat in self.flats) and self.needs == [self]

    @property
    def split_needs(self) -> bool:
        """Whether anything that this unit reads has to be gathered."""
        return any(unit.split for unit in self.needs)

    @property
    def bytes_full(self) -> int:
        """Bytes of the gathered parameters."""
        return sum(f.full.numel() * f.full.element_size() for f in self.flats if f.split)

    def gather(self, phase: str, microbatch: int) -> None:
        """Start to bring the whole parameters here, unless they are here or on their way."""
        self.settle()
        if self.filled or self.works is not None:
            return
        self.works = []
        for flat in self.flats:
            if flat.split:
                note = Note(phase, self.name, microbatch)
                start, place = (flat.rest, flat.held) if flat.kept is None else (flat.kept, flat.kept_place)
                self.works += flat.gather(
                    self.moves.backward if self.has_kept else self.moves.forward, start, place, note
                )

    def show(self) -> None:
        """Wait for the gather and point the parameters at the whole values."""
        if self.works is not None:
            for work in self.works:
                work.wait()
            self.works = None
            for flat in self.flats:
                flat.show()
            self.filled = True

    def free(self) -> None:
        """Back to rest; messages still under way are waited for first."""
        self.show()
        for flat in self.flats:
            flat.release()
        self.filled = not self.split

    def keep(self) -> None:
        """Before the unit is freed between forward and backward."""
        self.has_kept = True
        for flat in self.flats:
            if flat.split:
                flat.keep()

    def forget(self) -> None:
        """The microbatch is over."""
        self.has_kept = False
        for flat in self.flats:
            flat.forget()

    def publish(self) -> None:
        """After an update: bring the updated pieces to everyone who holds them at rest, without waiting."""
        mesh, rank = self.comm.mesh, self.comm.rank
        for flat in self.flats:
            flat.round_master()
            if flat.trainable:
                self.publishing += [
                    send(self.comm, m, flat.rest, flat.held[0], Note("publish", self.name))
                    for move in self.moves.publish
                    for m in lower(move, flat.layout, mesh, rank)
                ]

    def settle(self) -> None:
        """Wait for what ``publish`` began."""
        for work in self.publishing:
            work.wait()
        self.publishing.clear()

    def layout(self, uses: int) -> UnitLayout:
        """The unit as the planner sees it."""
        return UnitLayout(
            self.name,
            tuple(f.layout for f in self.flats),
            tuple(f.trainable for f in self.flats),
            uses,
            tuple(f.summed for f in self.flats),
        )

    def slots(self) -> Iterator[tuple[Flat, int]]:
        """Every parameter laid here, as its flat and its place in it."""
        for flat in self.flats:
            for index in range(len(flat.parameters)):
                yield flat, index
