"""A unit: parameters that are gathered and reduced together, in flat buffers (see ``storage``), and their state.

    state         full           rest     kept                  parameters are        bytes
    WHOLE         is ``rest``    whole    -                     views of ``full``     full
    SHARDED       empty          piece    nothing, or *         a NaN placeholder **  piece + kept
    UNSHARDING    being filled   piece    nothing, or *         a NaN placeholder **  piece + kept + full
    UNSHARDED     whole          piece    nothing, or *         views of ``full``     piece + kept + full
                   *  the piece of the row's kept cell (zero3: ``rest``), while any microbatch of the stage is in flight
                   ** in common memory (see ``storage``) views of ``full``, which reading refuses as well

                    unshard()                 wait()
         SHARDED ─────────────► UNSHARDING ───────────► UNSHARDED
            ▲                                               │
            └─────────────────── reshard() ─────────────────┘

A unit is WHOLE if the row, or a mesh of one rank, does not split it; it then has no transitions.  ``kept`` only changes
where the next ``unshard`` starts, and so which messages it sends: hpz gathers from a copy nearby; zero3_keep leaves
units UNSHARDED from forward to backward and sends nothing.  ``master``, the piece that the optimizer updates, is the
same in all states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from plait.comm import Comm, Work
from plait.table.cells import Moves
from plait.table.collectives import Note
from plait.torch_private import DisableTorchFunctionSubclass, are_functorch_transforms_active
from plait.zero.storage import Flat


class State(Enum):
    """The state of a unit's parameters; see the table above."""

    WHOLE = "whole"
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class Unit:
    """A module, by its name in the model (the model itself is ``root``), and the flat buffers of its parameters."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat], moves: Moves, comm: Comm) -> None:
        self.name = name or "root"
        self.module, self.flats, self.moves, self.comm = module, list(flats), moves, comm
        self.split = any(flat.split for flat in self.flats)
        self.state = State.SHARDED if self.split else State.WHOLE
        self.keeps_open = not moves.backward
        """True if the row keeps parameters whole from forward to backward."""
        self.users = 0
        """The number of modules that read the parameters now; the schedule counts as one while it holds them."""
        self.pins = 0
        """The number of readers outside of the passes, which leave a pinned unit open."""
        self.awaits_backward = False
        """True while the row keeps it open from forward to backward."""
        self.differentiated = True
        """True if a backward goes through it: its output required a gradient in the last training forward and, if the
        unit is one that gathers, got one in the last backward.  Only predictions read it."""
        self.stays_open = False
        """True if it stayed open until the last backward ended, as no input required a gradient (for predictions)."""
        self.was_read = False
        """True if it was pinned since it was gathered: a program may keep a view of its parameters."""
        self.gets_gradients = True
        """True if its parameters got gradients in the last backward."""
        self.open_units = OpenUnits()
        self.relate([], [])
        self._works: list[Work] = []
        self._split_flats = [flat for flat in self.flats if flat.split]
        self._published = [flat for flat in self.flats if flat.trainable and flat.published]
        self.bytes_full = sum(flat.bytes_full for flat in self._split_flats if flat.common is None)
        """The bytes of the gathered parameters, if they have their own memory."""

    def __repr__(self) -> str:
        return f"Unit({self.name}, {sum(len(flat.layout.slots) for flat in self.flats)} parameters, {self.state.value})"

    def relate(self, borrows: Sequence[Unit], ancestors: Sequence[Unit]) -> None:
        """Sets which other units the module reads (for tied parameters), and which units contain it."""
        self.needs = [self, *borrows]
        self.ancestors = list(ancestors)
        self.split_needs = any(unit.split for unit in self.needs)
        """True if anything that this unit reads has to be gathered."""
        self.look_at_frozen()

    def look_at_frozen(self) -> None:
        """Notes which parameters are frozen now."""
        with DisableTorchFunctionSubclass():
            train = [parameter.requires_grad for flat in self.flats for parameter in flat.parameters]
        self.trains = any(train)
        self.done_with_gradients = len(self.needs) == 1 and all(train)
        """True if the unit's parameters are not read once they have their gradients: autograd computes a weight's
        gradient in the same node as its input's.  Frozen and borrowed parameters may be read later."""

    def borrow(self, owner: Unit) -> None:
        """Adds another unit whose parameters the module reads."""
        self.relate([*self.needs[1:], owner], self.ancestors)

    def unshard(self, phase: str, microbatch: int, *, own: bool = False) -> None:
        """Starts to gather the parameters from the kept piece or the piece at rest; ``own``: not into common memory."""
        assert self.state is State.SHARDED, f"unit {self.name!r} is {self.state.value}"
        self.state = State.UNSHARDING
        self.open_units.add(self)
        for flat in self._split_flats:
            self._works += flat.unshard(phase, self.name, microbatch, own=own)

    def wait(self) -> None:
        """Waits for the messages and points the parameters at the whole values."""
        assert self.state is State.UNSHARDING, f"unit {self.name!r} is {self.state.value}"
        for work in self._works:
            work.wait()
        self._works.clear()
        for flat in self._split_flats:
            flat.show()
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Returns the unit to rest; waits first for messages that are still under way."""
        if self.state is State.UNSHARDING:
            self.wait()
        assert self.state is State.UNSHARDED, f"unit {self.name!r} is {self.state.value}"
        for flat in self._split_flats:
            flat.reshard(leave=self.was_read)
        self.state, self.was_read, self.awaits_backward = State.SHARDED, False, False
        self.open_units.remove(self)

    def pin(self) -> None:
        """Starts to gather the parameters, if they are at rest, for a reader outside of the passes."""
        self.pins += 1
        if self.state is State.SHARDED:
            self.unshard("state", -1, own=True)

    def unpin(self) -> None:
        """Ends such a read; returns the unit to rest, unless something else reads it."""
        self.pins -= 1
        if not self.pins:
            self.was_read = True
            if not self.users and not self.awaits_backward:
                self.reshard()

    def own(self) -> None:
        """Copies whole parameters from common memory into this rank's private memory."""
        for flat in self._split_flats:
            flat.own()

    def keep(self) -> None:
        """Makes gathers after a reshard between forward and backward start from the part that the row keeps."""
        assert self.state in (State.UNSHARDED, State.WHOLE), f"unit {self.name!r} is {self.state.value}"
        for flat in self._split_flats:
            flat.keep()

    def forget(self) -> None:
        """Forgets the kept piece: gathers start from the piece at rest again."""
        for flat in self._split_flats:
            flat.kept = None

    def gathers(self, tensor: Tensor) -> bool:
        """True if a tensor shares the memory of parameters gathered for this unit, which is freed with them."""
        if tensor.layout is not torch.strided or are_functorch_transforms_active():
            return False
        pointer = tensor.data_ptr()
        return any(flat.contains(pointer) for needed in self.needs for flat in needed._split_flats)

    def publish(self) -> list[Work]:
        """Starts, after an update, to send the updated pieces to every rank that has them at rest."""
        return [work for flat in self._published for work in flat.publish(Note("publish", self.name))]


class GatheredBytes:
    """The bytes of gathered parameters, over all stages of the rank: ``now``, and the peak so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0


class OpenUnits:
    """The units of a stage that are UNSHARDING or UNSHARDED, in the order in which their gathers began."""

    def __init__(self) -> None:
        self.units: dict[Unit, None] = {}
        self.gathered = GatheredBytes()

    def add(self, unit: Unit) -> None:
        """Counts a unit that starts to gather."""
        self.units[unit], count = None, self.gathered
        count.now += unit.bytes_full
        count.peak = max(count.peak, count.now)

    def remove(self, unit: Unit) -> None:
        """Stops counting a unit that is at rest again."""
        del self.units[unit]
        self.gathered.now -= unit.bytes_full


class GatherOrder:
    """The order in which a kind of pass unshards units.

    the last pass    0 1 2 3 4
    this one         0 1 . . .     expected next: 2; after 0 1 4, nothing is expected
    """

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self.seen: list[Unit] = []

    def begin(self) -> None:
        """Begins a pass: it is expected to repeat the last one; the first pass expects nothing."""
        self.expected, self.seen = self.seen, []

    def record(self, unit: Unit) -> None:
        """Records a unit that the pass unshards.  Once it leaves the expected order, the pass prefetches no more."""
        place = len(self.seen)
        if place >= len(self.expected) or self.expected[place] is not unit:
            self.expected = []
        self.seen.append(unit)


def parameters_of(units: Sequence[Unit]) -> Iterator[tuple[str, nn.Parameter, Flat, int]]:
    """Yields every parameter of the units: its name, the parameter, its flat and its index there."""
    for unit in units:
        for flat in unit.flats:
            for index, (slot, parameter) in enumerate(zip(flat.layout.slots, flat.parameters, strict=True)):
                yield slot.name, parameter, flat, index
