"""One rank's step as data: small operations on the flat buffers of its units.

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
    send, recv        the pipeline's messages; ``schedule.check`` proves them
    count, report     all ranks agree on the divisor of the loss; on the end of the step
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plait.schedule.actions import ADDS_GRADIENTS, MESSAGES, PASSES, SENDS, Action, Kind, Line, in_flight
from plait.table.agreement import counted
from plait.table.cells import DENSE, EXPERTS, Cell, Moves, StateAxes, Strategy, moves
from plait.table.flat import FlatLayout, Message, UnitLayout, lower
from plait.table.mesh import Mesh

COLLECTIVES = ("all_gather", "broadcast", "reduce_scatter", "reduce", "all_reduce")
"""The operations that a group performs together."""

Key = tuple[int, str, int]
"""A flat buffer: the stage, the unit, and its place in the unit."""


class Op(NamedTuple):
    """One operation of one rank."""

    kind: str
    flat: Key = (0, "", 0)
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
    action: Action | None = None
    """The action of ``send`` and ``recv``."""
    rows: tuple[int, int, int] = (0, 0, 0)
    """For ``count``: the range of ranks whose targets are added up."""

    def __str__(self) -> str:
        if self.action is not None:
            return f"{self.kind} {self.action}"
        if self.kind in ("count", "report"):
            return self.kind
        where = f"{self.flat[1]}[{self.start}:{self.stop}]"
        words = [
            self.kind,
            self.phase if self.kind == "read" else "",
            f"of {self.buffer}" if self.buffer else "",
            where,
        ]
        words += [f"microbatch {self.microbatch}"] if self.microbatch >= 0 else []
        return " ".join(filter(None, [*words, f"over {', '.join(self.axes)}" if self.axes else ""]))


Program = tuple[Op, ...]


class Settled(NamedTuple):
    """The facts that all operations of a rank on one flat buffer share."""

    key: Key
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


Buffered = Mapping[int, Sequence[Settled]]
"""Settled flat buffers, by stage."""

AGAIN = " of the head"
"""Marks a pass of the head, which reads a tied weight once more."""

PHASES = ("forward", "backward", "microbatch", "summed", "step", "publish")


def settle(stage: int, unit: UnitLayout, index: int, mesh: Mesh, strategy: Strategy, path: Moves, rank: int) -> Settled:
    """One flat buffer of a unit, on one rank."""
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
        key=(stage, unit.name, index),
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


def settle_all(
    stages: Mapping[int, Sequence[UnitLayout]], mesh: Mesh, strategy: Strategy, rank: int, path: Moves | None = None
) -> Buffered:
    """The flat buffers of a rank, by stage, in the order of its units.

    Args:
        path: the row's moves, if they replace those of each unit.
    """
    found = {axes: moves(strategy, mesh, axes) if path is None else path for axes in (DENSE, EXPERTS)}
    return {
        s: [
            settle(s, unit, i, mesh, strategy, found[unit.axes], rank) for unit in units for i in range(len(unit.flats))
        ]
        for s, units in stages.items()
    }


def write_program(line: Line, flats: Buffered, mesh: Mesh) -> Program:
    """Writes the step of one rank.

    Args:
        line: the rank's line of the completed schedule; actions of stages that are not in ``flats`` are left out.
        flats: the rank's buffers of the chosen stages.
    """
    writer = _Writer(flats, holds=any(a.kind is Kind.UNSHARD for a in line))
    updates = sum(action.kind is Kind.UPDATE for action in line)
    rows = counted(mesh)
    ops = [Op("count", rows=(rows.start, rows.stop, rows.step))]
    ops += [local(flat, "clear", "sum") for s in flats for flat in flats[s] if flat.trains]
    for action in line:
        updates -= action.kind is Kind.UPDATE
        if action.kind is Kind.UPDATE and not updates:
            ops.append(Op("report"))
            ops += [op for s in flats for op in writer.update(s)]
        elif action.stage in flats and action.kind is not Kind.UPDATE:
            ops += writer.action(action)
    return tuple(ops)


def local(flat: Settled, kind: str, buffer: str, microbatch: int = -1, phase: str = "") -> Op:
    """An operation of one rank on its own elements."""
    return Op(kind, flat.key, *flat.place(kind, buffer), microbatch, buffer=buffer, phase=phase)


def sent(flat: Settled, path: str, buffer: str, phase: str, microbatch: int = -1) -> list[Op]:
    """The row's messages in a phase of ``Moves``."""
    return [
        Op(s.kind, flat.key, s.start, s.stop, microbatch, s.axes, s.root, buffer, phase) for s in flat.messages[path]
    ]


class _Writer:
    """The operations of each action, in turn."""

    def __init__(self, flats: Buffered, *, holds: bool) -> None:
        self.flats, self.holds = flats, holds
        self.keeps_open = not any(flat.leaves for of_stage in flats.values() for flat in of_stage)
        """True if the row keeps parameters whole from forward to backward."""
        self.flying: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.open: set[Key] = set()

    def action(self, action: Action) -> list[Op]:
        s, kind = action.stage, action.kind
        flats = self.flats[s]
        if kind in MESSAGES:
            return [Op("send" if kind in SENDS else "recv", action=action)]
        if kind is Kind.UNSHARD:
            return [op for flat in flats for op in self.gather(flat, "unshard", -1)]
        if kind is Kind.RESHARD:
            ops = [op for flat in flats for op in self.free(flat, keep=bool(self.flying[s]))]
            (self.kept.add if self.flying[s] else self.kept.discard)(s)
            return [*ops, *([] if self.flying[s] else self.forget(s))]
        if kind is Kind.REDUCE:
            trained = [flat for flat in reversed(flats) if flat.trains]
            pending = [op for flat in trained if flat.summed for op in sent(flat, "summed", "sum", "step")]
            return [*pending, *(op for flat in trained for op in sent(flat, "step", "sum", "step"))]
        return self.one_pass(action) if kind in PASSES else []

    def one_pass(self, action: Action) -> list[Op]:
        """A forward, a backward or a part of one, with the row's operations around it."""
        s, m, kind = action.stage, action.microbatch, action.kind
        flats, backward = self.flats[s], kind in (Kind.BACKWARD, Kind.INPUT)
        ops: list[Op] = []
        if kind is Kind.FORWARD:
            for flat in flats:
                ops += [] if self.holds else self.gather(flat, "forward", m)
                ops.append(self.read(flat, "F", m))
                ops += [] if self.holds or self.keeps_open else self.free(flat, keep=True)
            if not self.holds:
                self.kept.add(s)
            ops += [op for flat in flats if flat.again for op in self.once_more(flat, f"F{AGAIN}", m)]
        self.flying[s] += in_flight(action)
        ops += [op for flat in flats if flat.again and backward for op in self.once_more(flat, f"B{AGAIN}", m)]
        for flat in reversed(flats):
            if backward and flat.differentiated:
                ops += [] if self.holds else self.gather(flat, "backward", m)
                ops.append(self.read(flat, "B", m))
            if kind in ADDS_GRADIENTS and flat.trains:
                ops.append(local(flat, "gradient", "sum" if flat.direct else "whole", m))
                if not flat.direct:
                    ops += sent(flat, "microbatch", "whole", "microbatch", m)
                    ops.append(local(flat, "add", "sum", m))
            if backward and not self.holds and not (self.keeps_open and self.flying[s]):
                ops += self.free(flat, keep=False)
        if backward and not self.holds and not self.flying[s]:
            self.kept.discard(s)
            ops += self.forget(s)
        return ops

    def once_more(self, flat: Settled, way: str, m: int) -> list[Op]:
        """The head's use of a tied weight."""
        forward, stays = way[0] == "F", self.holds or self.keeps_open
        ops = [] if self.holds else self.gather(flat, "forward" if forward else "backward", m)
        return [*ops, self.read(flat, way, m), *([] if stays else self.free(flat, keep=forward))]

    def gather(self, flat: Settled, phase: str, m: int) -> list[Op]:
        """Makes the flat whole, if it is not, from its kept piece or the piece at rest."""
        if not flat.split or flat.key in self.open:
            return []
        self.open.add(flat.key)
        kept = flat.key[0] in self.kept
        source = "kept" if kept and flat.keeps_more else "rest"
        path = "backward" if kept else "forward"
        return [local(flat, "open", source), *sent(flat, path, "full", phase, m)]

    def free(self, flat: Settled, *, keep: bool) -> list[Op]:
        """Frees the flat; if a backward follows, the row's kept piece stays."""
        if not flat.split or flat.key not in self.open:
            return []
        self.open.discard(flat.key)
        copies = keep and flat.keeps_more and flat.key[0] not in self.kept
        return [*[local(flat, "keep", "kept")] * copies, local(flat, "close", "full")]

    def forget(self, stage: int) -> list[Op]:
        """Drops the kept pieces: no backward of the stage follows."""
        return [local(f, "forget", "kept") for f in self.flats[stage] if f.split and f.keeps_more]

    @staticmethod
    def read(flat: Settled, way: str, m: int) -> Op:
        return local(flat, "read", "full" if flat.split else "rest", m, way)

    def update(self, stage: int) -> list[Op]:
        """Changes the optimizer's own piece, and publishes it to every rank that has it at rest."""
        trained = [flat for flat in self.flats[stage] if flat.trains]
        updates = [local(flat, "update", "rest") for flat in trained]
        return [*updates, *(op for flat in trained for op in sent(flat, "publish", "rest", "publish"))]
