"""The traffic of a step, in parameter volumes, against the papers' formulas.

P is the bytes of all parameters, N the data ranks, p the shard group, R the replicas, M the microbatches.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.predict.cost import StageTraffic, TiedTraffic, differences, predict_line, predict_step
from plait.predict.tensor import predict_tensor
from plait.run.models.gpt import GPT, GPTConfig
from plait.schedule.actions import ACTIVATION, GRADIENT, PASSES, TIED, Line
from plait.schedule.pipeline import Pipeline
from plait.table.agreement import num_reported
from plait.table.cells import TABLE, find_strategy
from plait.table.collectives import Entry, Note
from plait.table.flat import Cut, UnitLayout, lay
from plait.table.mesh import Mesh
from plait.table.tensor_plan import BACKWARD, FORWARD, Site
from plait.tensor import parallel_plan

STATE = ("forward", "backward", "microbatch", "step", "publish")


def units_for(mesh: Mesh, *, trains: bool = True, cut: Cut = "element") -> list[UnitLayout]:
    """Two units whose parameters fill their buffers to the last element under either cut."""
    n = mesh.data_size
    units = []
    for name, num_tensors in (("a", n), ("b", 2 * n)):
        flat = lay([(f"{name}{i}", (4, 16)) for i in range(num_tensors)], 4, n, cut)
        assert flat.numel == 64 * num_tensors
        units.append(UnitLayout(name, (flat,), (trains,)))
    return units


def volume(units: list[UnitLayout]) -> int:
    return sum(flat.numel * flat.itemsize for unit in units for flat in unit.flats)


def state_sent(units: list[UnitLayout], mesh: Mesh, row: str, num_microbatches: int, rank: int = 0) -> int:
    """Bytes that a rank sends in a step for parameters and gradients."""
    entries = predict_step(units, mesh, find_strategy(row), num_microbatches, rank)
    return sum(e.sent for e in entries if e.note.phase in STATE)


# ---- volumes ---------------------------------------------------------------------------------------------

# row: bytes(P, M, N, p, R), all divisions exact
VOLUMES: dict[str, Callable[[int, int, int, int, int], int]] = {
    "ddp": lambda P, M, N, p, R: 2 * P * (N - 1) // N,
    "zero1": lambda P, M, N, p, R: 2 * P * (N - 1) // N,
    "zero2": lambda P, M, N, p, R: (M + 1) * P * (N - 1) // N,
    "zero3": lambda P, M, N, p, R: 3 * M * P * (N - 1) // N,
    "zero3_keep": lambda P, M, N, p, R: 2 * M * P * (N - 1) // N,
    "hsdp": lambda P, M, N, p, R: 3 * M * P * (p - 1) // p + 2 * (P // p) * (R - 1) // R,
    "psdp": lambda P, M, N, p, R: 3 * M * P * (p - 1) // p + 2 * (P // p) * (R - 1) // R,
    "hpz": lambda P, M, N, p, R: 2 * M * P * (N - 1) // N + M * P * (p - 1) // p,
}


def test_every_row_has_its_formula() -> None:
    assert VOLUMES.keys() == TABLE.keys()


@settings(max_examples=80, deadline=None)
@given(row=st.sampled_from(list(TABLE)), p=st.integers(1, 4), replicas=st.integers(1, 4), m=st.integers(1, 5))
def test_volumes_of_every_row(row: str, p: int, replicas: int, m: int) -> None:
    mesh = Mesh(replica=replicas, shard=p)
    units = units_for(mesh)
    expected = VOLUMES[row](volume(units), m, mesh.data_size, p, replicas)
    for rank in range(mesh.size):
        assert state_sent(units, mesh, row, m, rank) == expected


@pytest.mark.parametrize("row", TABLE)
def test_one_rank_sends_nothing(row: str) -> None:
    assert predict_step(units_for(Mesh()), Mesh(), TABLE[row], 3, 0) == ()
    agreed = predict_step(units_for(Mesh(pipe=3)), Mesh(pipe=3), TABLE[row], 3, 0)
    assert {entry.note.phase for entry in agreed} == {"count", "report"}, "and pipeline ranks agree, no more"


@pytest.mark.parametrize("row", ["hsdp", "psdp"])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_any_number_of_microbatches_is_one_reduction_across_replicas(row: str, m: int) -> None:
    mesh, m_units = Mesh(replica=2, shard=2), ("a", "b")
    entries = predict_step(units_for(mesh), mesh, TABLE[row], m, rank=3)
    across = [e for e in entries if "replica" in e.axes and e.note.phase in STATE]
    reductions = [(e.kind, e.axes, e.note) for e in across if e.kind != "all_gather"]
    kind = {"hsdp": "all_reduce", "psdp": "reduce_scatter"}[row]
    assert reductions == [(kind, ("replica",), Note("step", name)) for name in m_units]
    gathers = [(e.kind, e.note) for e in across if e.kind == "all_gather"]
    assert gathers == ([("all_gather", Note("publish", name)) for name in m_units] if row == "psdp" else [])


# ---- frozen, owned whole ----------------------------------------------------------------------------------


def test_no_backward_goes_through_frozen_layers_before_which_nothing_trains() -> None:
    mesh = Mesh(shard=3)
    entries = predict_step(
        [replace(u, uses=(False,)) for u in units_for(mesh, trains=False)], mesh, TABLE["zero3"], 2, 0
    )
    assert {e.note.phase for e in entries} & set(STATE) == {"forward"}


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("mesh", [Mesh(shard=3), Mesh(replica=3), Mesh(replica=2, shard=2)], ids=str)
def test_owning_tensors_whole_moves_the_same_bytes_in_all(row: str, mesh: Mesh) -> None:
    """Broadcasts and reduces cost the ranks differently; the sum over ranks is that of the collectives."""
    n = mesh.data_size
    shapes = [(2 * n, 16)] + [(16,)] * (2 * n)  # equal pieces of elements, unequal ones of tensors
    units = {
        cut: [UnitLayout("a", (lay([(f"{i}", s) for i, s in enumerate(shapes)], 4, n, cut),), (True,))]
        for cut in ("element", "tensor")
    }
    assert not units["tensor"][0].flats[0].even and volume(units["tensor"]) == volume(units["element"])
    total = {cut: sum(state_sent(units[cut], mesh, row, 2, rank) for rank in range(mesh.size)) for cut in units}
    assert total["tensor"] == total["element"]


# ---- the two agreements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize(("m", "words"), [(1, 1 + 1 + 1 + 3), (5, 1 + 5 + 1 + 3)])
def test_a_step_has_two_small_agreements(row: str, m: int, words: int) -> None:
    """Counts: 4 numbers a rank.  Report: squares, a loss per microbatch, a bit per trainable parameter, three more."""
    mesh = Mesh(replica=2, shard=2, tensor=2)
    entries = predict_step(units_for(mesh), mesh, TABLE[row], m, 0)
    order = ("pipe", "replica", "shard", "tensor")
    assert [e for e in entries if e.note.phase not in STATE] == [
        Entry("all_gather", order, 8 * 4 * 8, 7 * 4 * 8, Note("count")),
        Entry("all_gather", order, 8 * words * 8, 7 * words * 8, Note("report")),
    ]


def test_gradient_bits_travel_32_to_a_number() -> None:
    assert [num_reported(1, n) - 5 for n in (0, 1, 32, 33, 64, 65)] == [0, 1, 1, 2, 2, 3]


LEDGER = predict_step(units_for(Mesh(shard=2)), Mesh(shard=2), TABLE["zero2"], 2, 0)


def test_equal_ledgers_have_no_differences_in_whatever_order() -> None:
    assert differences(LEDGER, LEDGER) == []
    assert differences(LEDGER, reversed(LEDGER)) == []


def test_differences_find_what_was_added_dropped_or_changed() -> None:
    entry = LEDGER[0]
    (added,) = differences(LEDGER, [*LEDGER, entry])
    assert added == f"measured, not predicted (1 times): {entry}"
    (dropped,) = differences(LEDGER, LEDGER[1:])
    assert dropped == f"predicted, not measured (1 times): {entry}"
    for changed in (
        replace(entry, kind="all_reduce"),
        replace(entry, axes=("shard",)),
        replace(entry, bytes=entry.bytes + 1),
        replace(entry, sent=entry.sent - 1),
        replace(entry, note=replace(entry.note, phase="step")),
        replace(entry, note=replace(entry.note, unit="z")),
        replace(entry, note=replace(entry.note, microbatch=9)),
    ):
        assert differences(LEDGER, [changed, *LEDGER[1:]]) == [
            f"predicted, not measured (1 times): {entry}",
            f"measured, not predicted (1 times): {changed}",
        ]
    assert differences([entry] * 3, [entry]) == [f"predicted, not measured (2 times): {entry}"]


BATCH, TIME, WIDTH, LAYERS = 3, 12, 16, 5
SIZES = GPTConfig(
    vocabulary=24, num_layers=LAYERS, width=WIDTH, num_heads=4, num_kv_heads=4, hidden=20, max_length=TIME
)
WAYS = [2, 4]


def entries(ways: int, *, sequence: bool) -> tuple[Entry, ...]:
    sites = parallel_plan(GPT(SIZES), ways, sequence=sequence).sites
    return predict_tensor(sites, [(BATCH, TIME)], Mesh(tensor=ways), 4, sequence=sequence)


def of_layers(found: tuple[Entry, ...]) -> list[Entry]:
    return [e for e in found if e.note.unit.startswith("blocks.")]


@pytest.mark.parametrize("ways", WAYS)
def test_a_layer_has_two_all_reduces_forward_and_two_backward(ways: int) -> None:
    """Each of batch * time * width elements (Megatron-LM)."""
    found = of_layers(entries(ways, sequence=False))
    assert Counter((e.kind, e.note.phase) for e in found) == {
        ("all_reduce", FORWARD): 2 * LAYERS,
        ("all_reduce", BACKWARD): 2 * LAYERS,
    }
    assert {e.bytes for e in found} == {BATCH * TIME * WIDTH * 4}
    assert {e.axes for e in found} == {("tensor",)}
    assert sum(e.sent for e in found) == 4 * LAYERS * 2 * (ways - 1) * BATCH * TIME * WIDTH * 4 // ways


@pytest.mark.parametrize("ways", WAYS)
def test_sequence_parallelism_sends_the_same_volume_as_reduce_scatters_and_all_gathers(ways: int) -> None:
    """Each all-reduce becomes one of each, forward and backward (Korthikanti et al.)."""
    whole, cut = of_layers(entries(ways, sequence=False)), of_layers(entries(ways, sequence=True))
    assert Counter((e.kind, e.note.phase) for e in cut) == {
        (kind, phase): 2 * LAYERS for kind in ("all_gather", "reduce_scatter") for phase in (FORWARD, BACKWARD)
    }
    for phase in (FORWARD, BACKWARD):
        assert sum(e.sent for e in cut if e.note.phase == phase) == sum(e.sent for e in whole if e.note.phase == phase)


def test_the_ends_cost_one_sum_of_the_embedding_one_of_the_heads_input_and_three_numbers_per_target() -> None:
    found = [e for e in entries(2, sequence=False) if not e.note.unit.startswith("blocks.")]
    stream = BATCH * TIME * WIDTH * 4
    assert [(e.kind, e.bytes, e.note.phase, e.note.unit) for e in found] == [
        ("all_reduce", stream, FORWARD, "embed"),
        ("all_reduce", stream, BACKWARD, "head"),
        ("all_gather", 2 * 3 * BATCH * TIME * 4, FORWARD, "loss"),
    ]


def test_a_gathered_output_travels_in_equal_pieces() -> None:
    """5 features over 4 ranks are 2, 2, 1, 0 and travel as 4 times 2."""
    for sequence in (False, True):
        found = predict_tensor([Site("gather", "out", 5)], [(3, 7)], Mesh(tensor=4), 8, sequence=sequence)
        size = 3 * 7 * 8 * 8
        assert found == (Entry("all_gather", ("tensor",), size, size // 4 * 3, Note(FORWARD, "out", 0)),)


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
