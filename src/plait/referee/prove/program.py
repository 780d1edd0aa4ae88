"""One rank's step as data: small operations on one of its flat buffers.

    schedule       row's moves       operations
    0UNSHARD       all_gather        open from rest, all_gather of full
    0F0            -                 read F
    0B0            reduce_scatter    read B, gradient to whole, reduce_scatter of whole, add to sum
    0RESHARD       -                 close
    0REDUCE        all_reduce        all_reduce of sum
    0UPDATE        all_gather        update of rest by sum, all_gather of rest

``flat.lower`` gives a buffer's messages, as it does for the engine; they are where ``predict.cost`` counts them.  The
other operations describe the numbers in between:

    open, close       ``full`` is filled from the values at rest or the kept ones; it is freed
    keep, forget      the values that the row keeps from forward to backward are copied; they are dropped
    read              a pass reads the whole flat
    gradient          a backward writes a microbatch's gradient to ``whole``, or adds it to ``sum``
    add               a reduced piece of ``whole`` is added to ``sum``
    clear             ``sum`` is emptied before a step
    update            the optimizer changes a piece of ``rest`` by the same piece of ``sum``
    count             all ranks agree on the divisor of the loss

A buffer's programs are proved without those of others: every member of a group follows the same line, so their
collectives on several buffers come in one order.
"""

from collections.abc import Mapping
from typing import NamedTuple

from plait.schedule.actions import ADDS_GRADIENTS, PASSES, Action, Kind, Line, in_flight
from plait.table.agreement import counted
from plait.table.cells import DENSE, Cell, Moves, StateAxes, Strategy
from plait.table.flat import FlatLayout, Message, UnitLayout, lower
from plait.table.mesh import Mesh

COLLECTIVES = ("all_gather", "broadcast", "reduce_scatter", "reduce", "all_reduce")
"""The operations that a group performs together."""


class Op(NamedTuple):
    """One operation of one rank."""

    kind: str
    start: int = 0
    stop: int = 0
    """The end of its elements in the flat buffer; ``start`` is the first."""
    microbatch: int = -1
    axes: tuple[str, ...] = ()
    root: int = -1
    buffer: str = ""
    """``rest``, ``full``, ``kept``, ``whole`` (a microbatch's gradient) or ``sum``."""
    phase: str = ""
    """A message's phase, as in the ledger; ``F`` or ``B`` for a read."""
    rows: tuple[int, int, int] = (0, 0, 0)
    """For ``count``: the range of ranks whose targets are added up."""

    def __str__(self) -> str:
        if self.kind == "count":
            return self.kind
        buffer = f"of {self.buffer}" if self.buffer else ""
        words = [self.kind, self.phase if self.kind == "read" else "", f"{buffer}[{self.start}:{self.stop}]"]
        words += [f"microbatch {self.microbatch}"] if self.microbatch >= 0 else []
        return " ".join(filter(None, [*words, f"over {', '.join(self.axes)}" if self.axes else ""]))


Program = tuple[Op, ...]


class Settled(NamedTuple):
    """The facts that all operations of a rank on one flat buffer share."""

    name: str
    """The name of its unit."""
    layout: FlatLayout
    trains: bool
    summed: bool
    """True if its gradient is pending over the tensor axis."""
    differentiated: bool
    messages: Mapping[str, tuple[Message, ...]]
    """Its messages, by phase of ``Moves``."""
    held: tuple[int, int]
    kept: tuple[int, int]
    grads: tuple[int, int]
    optim: tuple[int, int]
    split: bool
    keeps_more: bool
    direct: bool
    """True if gradients go straight into the sum."""
    leaves: bool
    """True if it is freed between forward and backward."""
    axes: StateAxes = DENSE
    """The axes over which its state is kept."""
    again: bool = False
    """True if the head also reads it, after all others."""

    def place(self, kind: str, buffer: str) -> tuple[int, int]:
        """The elements that an operation of this rank works on."""
        match kind, buffer:
            case "open", "rest":
                return self.held
            case ("open", "kept") | ("keep", _):
                return self.kept
            case ("read", _) | ("gradient", _):
                return 0, self.layout.numel
            case "add", _:
                return self.grads
            case "update", _:
                return self.optim
        return 0, 0


AGAIN = " of the head"
"""Marks a pass of the head, which reads a tied weight once more."""

PHASES = ("forward", "backward", "microbatch", "summed", "step", "publish")


def settle(unit: UnitLayout, index: int, mesh: Mesh, strategy: Strategy, path: Moves, rank: int) -> Settled:
    """One flat buffer of a unit, on one rank, with the row's moves for the unit."""
    layout = unit.flats[index]

    def place(cell: Cell) -> tuple[int, int]:
        split = unit.axes.of(cell.split)
        return layout.piece(mesh.count(split), mesh.index(rank, split))

    def ways(cell: Cell) -> int:
        return mesh.count(unit.axes.of(cell.split))

    sent = {
        phase: tuple(m for move in getattr(path, phase) for m in lower(move, layout, mesh, rank)) for phase in PHASES
    }
    return Settled(
        name=unit.name,
        layout=layout,
        trains=unit.trainable[index],
        summed=bool(unit.summed and unit.summed[index]),
        differentiated=unit.differentiated,
        messages=sent,
        held=place(strategy.params),
        kept=place(strategy.kept),
        grads=place(strategy.grads),
        optim=place(strategy.optim),
        split=ways(strategy.params) > 1,
        keeps_more=ways(strategy.kept) != ways(strategy.params),
        direct=ways(strategy.grads) == 1,
        leaves=bool(path.backward),
        axes=unit.axes,
        again=len(unit.uses) > 1,
    )


def write_program(line: Line, flat: Settled, mesh: Mesh) -> Program:
    """Writes the step of one rank on one of its buffers.

    Args:
        line: the actions of the buffer's stage in the completed schedule.
    """
    writer = _Writer(flat, holds=any(a.kind is Kind.UNSHARD for a in line))
    rows = counted(mesh)
    ops = [Op("count", rows=(rows.start, rows.stop, rows.step)), *[local(flat, "clear", "sum")] * flat.trains]
    return tuple(ops + [op for action in line for op in writer.action(action)])


def local(flat: Settled, kind: str, buffer: str, microbatch: int = -1, phase: str = "") -> Op:
    """An operation of one rank on its own elements."""
    return Op(kind, *flat.place(kind, buffer), microbatch, buffer=buffer, phase=phase)


def sent(flat: Settled, path: str, buffer: str, phase: str, microbatch: int = -1) -> list[Op]:
    """The row's messages in a phase of ``Moves``."""
    return [Op(s.kind, s.start, s.stop, microbatch, s.axes, s.root, buffer, phase) for s in flat.messages[path]]


class _Writer:
    """The operations of each action, in turn."""

    def __init__(self, flat: Settled, *, holds: bool) -> None:
        self.flat, self.holds = flat, holds
        self.keeps_open = not flat.leaves
        """True if the row keeps parameters whole from forward to backward."""
        self.flying = 0
        self.kept = self.open = False

    def action(self, action: Action) -> list[Op]:
        flat, kind = self.flat, action.kind
        if kind is Kind.UNSHARD:
            return self.gather("unshard", -1)
        if kind is Kind.RESHARD:
            ops = self.free(keep=bool(self.flying))
            self.kept = bool(self.flying)
            return ops if self.kept else [*ops, *self.forget()]
        if kind is Kind.REDUCE and flat.trains:
            return [*(sent(flat, "summed", "sum", "step") if flat.summed else ()), *sent(flat, "step", "sum", "step")]
        if kind is Kind.UPDATE and flat.trains:  # it is published to every rank that has it at rest
            return [local(flat, "update", "rest"), *sent(flat, "publish", "rest", "publish")]
        return self.one_pass(action) if kind in PASSES else []

    def one_pass(self, action: Action) -> list[Op]:
        """A forward, a backward or a part of one, with the row's operations around it."""
        flat, m, kind = self.flat, action.microbatch, action.kind
        backward = kind in (Kind.BACKWARD, Kind.INPUT)
        ops: list[Op] = []
        if kind is Kind.FORWARD:
            ops += [] if self.holds else self.gather("forward", m)
            ops.append(self.read("F", m))
            ops += [] if self.holds or self.keeps_open else self.free(keep=True)
            self.kept = self.kept or not self.holds
            ops += self.once_more(f"F{AGAIN}", m)
        self.flying += in_flight(action)
        if backward:
            ops += self.once_more(f"B{AGAIN}", m)
        if backward and flat.differentiated:
            ops += [] if self.holds else self.gather("backward", m)
            ops.append(self.read("B", m))
        if kind in ADDS_GRADIENTS and flat.trains:
            ops.append(local(flat, "gradient", "sum" if flat.direct else "whole", m))
            if not flat.direct:
                ops += [*sent(flat, "microbatch", "whole", "microbatch", m), local(flat, "add", "sum", m)]
        if backward and not self.holds and not (self.keeps_open and self.flying):
            ops += self.free(keep=False)
        if backward and not self.holds and not self.flying:
            self.kept = False
            ops += self.forget()
        return ops

    def once_more(self, way: str, m: int) -> list[Op]:
        """The head's use of a tied weight."""
        if not self.flat.again:
            return []
        forward, stays = way[0] == "F", self.holds or self.keeps_open
        ops = [] if self.holds else self.gather("forward" if forward else "backward", m)
        return [*ops, self.read(way, m), *([] if stays else self.free(keep=forward))]

    def gather(self, phase: str, m: int) -> list[Op]:
        """Makes the flat whole, if it is not, from its kept piece or the piece at rest."""
        flat = self.flat
        if not flat.split or self.open:
            return []
        self.open = True
        source, path = "kept" if self.kept and flat.keeps_more else "rest", "backward" if self.kept else "forward"
        return [local(flat, "open", source), *sent(flat, path, "full", phase, m)]

    def free(self, *, keep: bool) -> list[Op]:
        """Frees the flat; if a backward follows, the row's kept piece stays."""
        flat = self.flat
        if not flat.split or not self.open:
            return []
        self.open = False
        copies = keep and flat.keeps_more and not self.kept
        return [*[local(flat, "keep", "kept")] * copies, local(flat, "close", "full")]

    def forget(self) -> list[Op]:
        """Drops the kept piece: no backward of the stage follows."""
        return [local(self.flat, "forget", "kept")] * (self.flat.split and self.flat.keeps_more)

    def read(self, way: str, m: int) -> Op:
        return local(self.flat, "read", "full" if self.flat.split else "rest", m, way)
