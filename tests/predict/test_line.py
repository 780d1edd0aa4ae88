"""The messages of one rank under a pipeline, counted by hand from its line.

1F1B on two stages under zero3: a stage is gathered once in a step, since the rank needs no other; every microbatch is
reduced; an activation crosses to the next stage, and its gradient comes back.
"""

from collections import Counter

import pytest

from plait.predict.cost import StageTraffic, TiedTraffic, predict_line
from plait.schedule.actions import ACTIVATION, GRADIENT, PASSES, TIED, Line
from plait.schedule.pipeline import Pipeline
from plait.table.agreement import num_reported
from plait.table.cells import TABLE, find_strategy
from plait.table.collectives import Entry, Note
from plait.table.flat import UnitLayout, lay
from plait.table.mesh import Mesh

M = 3
AXES = ("shard", "replica")
"""Over which a row that splits everything gathers and reduces."""
HANDED = (40, 32, 32)
"""Bytes of the activation of each microbatch: 5, 4 and 4 samples of two numbers."""
UNIT_BYTES = {"a": 256, "b": 512, "c": 256}
NUMBERS = {"count": 4, "report": num_reported(M, 6)}


def unit(name: str) -> UnitLayout:
    """A unit whose buffer its parameters fill to the last element on two ranks."""
    num_tensors = UNIT_BYTES[name] // 128
    flat = lay([(f"{name}{i}", (4, 8)) for i in range(num_tensors)], 4, 2, "element")
    assert flat.numel * 4 == UNIT_BYTES[name]
    return UnitLayout(name, (flat,), (True,))


def plans(stages: dict[int, str], count: int) -> dict[int, StageTraffic]:
    """Stages of a rank, by the letters of their units; first and last have one neighbour."""
    return {
        stage: StageTraffic(tuple(map(unit, letters)), HANDED if stage < count - 1 else (), HANDED if stage else ())
        for stage, letters in stages.items()
    }


def line_of(order: str, rank: int, row: str, hold: int | None = 1) -> Line:
    return Pipeline(order, 2, hold=hold).completed(M, TABLE[row])[rank]


def predict(order: str, row: str, stages: dict[int, str], rank: int, mesh: Mesh, hold: int | None = 1) -> list[Entry]:
    place = mesh.coordinates(rank)["pipe"]
    count = Pipeline(order, 2).num_stages
    line = line_of(order, place, row, hold)
    return list(predict_line(line, plans(stages, count), mesh, TABLE[row], M, 6, rank))


def agreed(mesh: Mesh) -> list[Entry]:
    """The two small messages of every step."""
    found = []
    for phase, numbers in NUMBERS.items():
        size = 8 * numbers * mesh.size
        axes = ("pipe", "replica", "shard", "tensor")
        found.append(Entry("all_gather", axes, size, size - size // mesh.size, Note(phase)))
    return found


def crossing(kind: str, phase: str, source: int) -> list[Entry]:
    sent = [size if kind == "send" else 0 for size in HANDED]
    return [Entry(kind, ("pipe",), HANDED[m], sent[m], Note(phase, f"stage {source}", m)) for m in range(M)]


# ---- 1F1B, two stages, zero3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_on_two_stages_under_zero3_message_by_message(rank: int) -> None:
    """Rank 0 and 1 share stage 0 (units a, b), rank 2 and 3 stage 1 (c)."""
    mesh = Mesh(pipe=2, shard=2)
    stage = rank // 2
    found = predict("1f1b", "zero3", {0: {0: "ab"}, 1: {1: "c"}}[stage], rank, mesh)
    names = "ab" if stage == 0 else "c"
    expected = agreed(mesh)
    for name in names:
        size = UNIT_BYTES[name]
        expected.append(Entry("all_gather", AXES, size, size // 2, Note("unshard", name)))
        for m in range(M):
            note = Note("microbatch", name, m)
            expected.append(Entry("reduce_scatter", AXES, size, size // 2, note))
    kinds = ("send", "recv") if stage == 0 else ("recv", "send")
    expected += crossing(kinds[0], ACTIVATION, 0) + crossing(kinds[1], GRADIENT, 1)
    assert Counter(found) == Counter(expected)


@pytest.mark.parametrize(("hold", "gathers"), [(0, (6, 6)), (1, (4, 3)), (2, (1, 1))])
def test_hold_decides_how_often_stages_are_gathered(hold: int, gathers: tuple[int, int]) -> None:
    """Stages of interleaved's rank 0, pass by pass: 0 0 2 2 0 2 2 2 0 0 2 0.  hold=1 follows its runs."""
    line = line_of("interleaved", 0, "zero3", hold)
    assert [a.stage for a in line if a.kind in PASSES] == [0, 0, 2, 2, 0, 2, 2, 2, 0, 0, 2, 0]
    entries = predict("interleaved", "zero3", {0: "a", 2: "b"}, 0, Mesh(pipe=2, shard=2), hold)
    found = Counter(entry.note.unit for entry in entries if entry.note.phase == "unshard")
    assert (found["a"], found["b"]) == gathers
    assert not any(entry.note.phase in ("forward", "backward") for entry in entries)


# ---- weights that stages share ------------------------------------------------------------------------------------

TIES = [
    # pipe coordinate of each stage, rank, sends, receives
    ((0, 1), 0, 1, 1),
    ((0, 1), 1, 1, 1),
    ((0, 0), 0, 0, 0),
    ((0, 1), 2, 0, 0),
    ((0, 1, 2), 1, 2, 2),
    ((0, 1, 0), 0, 2, 1),
    ((0, 1, 0), 1, 1, 2),
]


@pytest.mark.parametrize(("owners", "rank", "sends", "receives"), TIES)
def test_uses_of_a_tied_weight_cross_once(owners: tuple[int, ...], rank: int, sends: int, receives: int) -> None:
    mesh = Mesh(pipe=3)
    found = predict_line((), {}, mesh, find_strategy("ddp"), M, 6, rank, [TiedTraffic("w", owners, 72)])
    tied = [entry for entry in found if entry.note.phase == TIED]
    assert all((e.axes, e.bytes, e.note.unit) == (("pipe",), 72, "w") for e in tied)
    assert Counter((e.kind, e.sent) for e in tied) == Counter({("send", 72): sends, ("recv", 0): receives})
