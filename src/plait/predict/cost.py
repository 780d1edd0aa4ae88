"""The ledger before the run: every message of a step, derived from the table.

``predict_step`` lists the ``Entry`` objects that a comm's ledger records, byte for byte.  Their order is not part of
the prediction (prefetch and overlap change it): compare them as multisets.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from plait.schedule.actions import ACTIVATION, ADDS_GRADIENTS, GRADIENT, TIED, Kind, Line, carries, in_flight
from plait.schedule.orders import one_stage
from plait.table.agreement import AGREEING, COUNTS, NUMBER_BYTES, num_reported
from plait.table.cells import DENSE, EXPERTS, Move, Strategy, moves
from plait.table.collectives import Entry, Note, bytes_sent
from plait.table.flat import UnitLayout, lower
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class StageTraffic:
    """The messages of one of a rank's stages."""

    units: tuple[UnitLayout, ...]
    handed_bytes: tuple[int, ...] = ()
    """The bytes of the activation that the stage sends to the next, for each microbatch; empty on the last stage."""
    received_bytes: tuple[int, ...] = ()
    """The bytes of the activation that the stage receives, for each microbatch; empty on the first stage."""


@dataclass(frozen=True)
class TiedTraffic:
    """A weight that several stages use."""

    name: str
    owners: tuple[int, ...]
    """The pipe coordinate of each of these stages, in order."""
    bytes: int
    """The bytes of the rank's piece of it in the optimizer's cell."""


def predict_step(
    units: Sequence[UnitLayout], mesh: Mesh, strategy: Strategy, num_microbatches: int, rank: int
) -> tuple[Entry, ...]:
    """Returns every message of a rank in one step of one stage; ``units`` are those of ``Engine.layouts``, all with
    gradients."""
    trainable = sum(len(f.slots) for u in units for f, t in zip(u.flats, u.trainable, strict=True) if t)
    line = one_stage(num_microbatches)[0]
    return predict_line(line, {0: StageTraffic(tuple(units))}, mesh, strategy, num_microbatches, trainable, rank)


def predict_line(
    line: Line,
    stages: Mapping[int, StageTraffic],
    mesh: Mesh,
    strategy: Strategy,
    num_microbatches: int,
    num_trainable: int,
    rank: int,
    tied: Sequence[TiedTraffic] = (),
) -> tuple[Entry, ...]:
    """Returns every message of a rank in one step, following its line of the completed schedule.

    Args:
        stages: the stages of this rank, by number.
        num_trainable: the number of the whole model's trainable parameters.
        tied: weights that stages of this rank share with others.
    """
    paths = {axes: moves(strategy, mesh, axes) for axes in (DENSE, EXPERTS)}
    entries: list[Entry] = []

    def add(
        phase: str,
        stage: int,
        first: str,
        microbatch: int = -1,
        *,
        later: str = "",
        waits: bool = False,
        trained: bool = False,
        summed: bool = False,
    ) -> None:
        """Adds the messages of a path (a field of ``Moves``) for every flat buffer of a stage.  ``later`` is the path
        of a unit's further uses; ``waits`` is ``open_still`` of ``UnitLayout.backward_uses``."""
        cell = strategy.grads if phase in ("microbatch", "step") else strategy.params
        for unit in stages[stage].units:
            if (phase == "backward" and not unit.differentiated) or (phase == "microbatch" and not unit.reduced):
                continue
            path: dict[str, tuple[Move, ...]] = {"": (), **vars(paths[unit.axes])}
            for index, flat in enumerate(unit.flats):
                if (trained and not unit.trainable[index]) or (summed and not (unit.summed and unit.summed[index])):
                    continue
                again = unit.unkept if phase == "forward" else 0
                uses = unit.backward_uses(open_still=waits) if phase == "backward" else len(unit.uses)
                steps = [*path[first] * (1 + again), *path[later] * (uses - 1 - again)]
                for message in chain.from_iterable(lower(step, flat, mesh, rank) for step in steps):
                    size = message.numel * flat.itemsize_in(cell)
                    root = mesh.index(rank, message.axes) == message.root
                    sent = bytes_sent(message.kind, size, mesh.count(message.axes), root=root)
                    entries.append(Entry(message.kind, message.axes, size, sent, Note(phase, unit.name, microbatch)))

    def between_stages(kind: str, size: int, note: Note) -> Entry:
        return Entry(kind, ("pipe",), size, bytes_sent(kind, size, 2), note)

    holds = any(action.kind is Kind.UNSHARD for action in line)
    flying: Counter[int] = Counter()
    kept: set[int] = set()
    for action in line:
        s, m = action.stage, action.microbatch
        match action.kind:
            case Kind.UNSHARD:
                add("unshard", s, "backward" if s in kept else "forward")
            case Kind.RESHARD:
                (kept.add if flying[s] else kept.discard)(s)
            case Kind.FORWARD:
                if not holds:  # after a use, gathers start from the part that the row keeps
                    add("forward", s, "backward" if flying[s] else "forward", m, later="backward")
            case Kind.BACKWARD | Kind.INPUT:
                if not holds:
                    add("backward", s, "backward", m, later="backward", waits=action.kind is Kind.BACKWARD)
            case Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B as message:
                value, is_send = carries(action), message in (Kind.SEND_F, Kind.SEND_B)
                note = Note(ACTIVATION if value.way == "F" else GRADIENT, f"stage {value.stage}", m)
                sizes = stages[s].handed_bytes if is_send == (value.way == "F") else stages[s].received_bytes
                entries.append(between_stages("send" if is_send else "recv", sizes[m], note))
            case Kind.REDUCE:
                add("step", s, "summed", trained=True, summed=True)
                add("step", s, "step", trained=True)
            case Kind.UPDATE:
                add("publish", s, "publish", trained=True)
        flying[s] += in_flight(action)
        if action.kind in ADDS_GRADIENTS:
            add("microbatch", s, "microbatch", m, trained=True)
    here = mesh.coordinates(rank)["pipe"]
    for edge in tied:
        others = [owner for owner in edge.owners if owner != here]
        sends = edge.owners.count(here) * len(set(others)) if edge.bytes else 0
        receives = len(others) if edge.bytes and here in edge.owners else 0
        entries += [between_stages("send", edge.bytes, Note(TIED, edge.name))] * sends
        entries += [between_stages("recv", edge.bytes, Note(TIED, edge.name))] * receives
    ranks = mesh.count(AGREEING)
    if ranks > 1:
        for phase, numbers in (("count", COUNTS), ("report", num_reported(num_microbatches, num_trainable))):
            size = NUMBER_BYTES * numbers * ranks
            entries.append(Entry("all_gather", AGREEING, size, bytes_sent("all_gather", size, ranks), Note(phase)))
    return tuple(entries)


def differences(predicted: Iterable[Entry], measured: Iterable[Entry]) -> list[str]:
    """Lists the lines that only one ledger has, as text; empty when the ledgers are equal, byte for byte."""
    left, right = Counter(predicted), Counter(measured)
    return [
        *(f"predicted, not measured ({n} times): {e}" for e, n in (left - right).items()),
        *(f"measured, not predicted ({n} times): {e}" for e, n in (right - left).items()),
    ]
