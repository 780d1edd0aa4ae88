"""The ledger before the run: every message of a step, derived from the table.

``predict_step`` walks the phases of a step in the order of the moves and lists the same ``Entry`` objects that a
comm's ledger records, so a test can hold one against the other, byte for byte.  The order of entries is not part of
the prediction (prefetch and overlap change it); compare them as multisets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from plait.core.agreement import AGREEING, COUNTS, NUMBER_BYTES, num_reported
from plait.core.cells import Move, Strategy, moves
from plait.core.collectives import Entry, Note, bytes_sent
from plait.core.flat import FlatLayout, UnitLayout, lower
from plait.core.mesh import Mesh


def predict_step(
    units: Sequence[UnitLayout], mesh: Mesh, strategy: Strategy, num_microbatches: int, rank: int
) -> tuple[Entry, ...]:
    """Every message that a rank takes part in during one step with gradients for every unit.

    Args:
        units: the units with their flat layouts, as ``Engine.layouts`` gives them.
        rank: whose messages; broadcasts and reduces cost the root and the others differently.
    """
    plan = moves(strategy)
    entries: list[Entry] = []

    def add(phase: str, unit: UnitLayout, flat: FlatLayout, path: Iterable[Move], microbatch: int = -1) -> None:
        for step in path:
            for message in lower(step, flat, mesh, rank):
                ways = mesh.count(message.axes)
                size = message.numel * flat.itemsize
                root = mesh.index(rank, message.axes) == message.root
                sent = bytes_sent(message.kind, size, ways, root=root)
                entries.append(Entry(message.kind, message.axes, size, sent, Note(phase, unit.name, microbatch)))

    for unit in units:
        summed = unit.summed or (False,) * len(unit.flats)
        for flat, trains, pending in zip(unit.flats, unit.trainable, summed, strict=True):
            for microbatch in range(num_microbatches):
                for use in range(unit.uses):
                    # after the first use the row has what it keeps, and gathers from there
                    add("forward", unit, flat, plan.backward if use else plan.forward, microbatch)
                    add("backward", unit, flat, plan.backward, microbatch)
                if trains:
                    add("microbatch", unit, flat, plan.microbatch, microbatch)
            if trains:
                add("step", unit, flat, (*plan.summed, *plan.step) if pending else plan.step)
                add("publish", unit, flat, plan.publish)
    ranks = mesh.count(AGREEING)
    if ranks > 1:
        trainable = sum(len(f.slots) for u in units for f, t in zip(u.flats, u.trainable, strict=True) if t)
        for phase, numbers in (("count", COUNTS), ("report", num_reported(num_microbatches, trainable))):
            size = NUMBER_BYTES * numbers * ranks
            entries.append(Entry("all_gather", AGREEING, size, bytes_sent("all_gather", size, ranks), Note(phase)))
    return tuple(entries)


def by_phase(entries: Iterable[Entry]) -> dict[str, tuple[int, int]]:
    """Messages and bytes sent by this rank, by phase of the step."""
    messages: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for entry in entries:
        messages[entry.note.phase] += 1
        sent[entry.note.phase] += entry.sent
    return {phase: (messages[phase], sent[phase]) for phase in messages}


def differences(predicted: Iterable[Entry], measured: Iterable[Entry]) -> list[str]:
    """What stands in one ledger and not in the other, as text; empty when they are equal, byte for byte."""
    left, right = Counter(predicted), Counter(measured)
    return [
        *(f"predicted, not measured ({n} times): {e}" for e, n in (left - right).items()),
        *(f"measured, not predicted ({n} times): {e}" for e, n in (right - left).items()),
    ]
