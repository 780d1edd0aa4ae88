"""The messages of tensor parallelism, against the papers' volumes."""

from __future__ import annotations

from collections import Counter

import pytest

from plait.predict.tensor import predict_tensor
from plait.run.models.gpt import GPT, GPTConfig
from plait.table.collectives import Entry, Note
from plait.table.mesh import Mesh
from plait.table.tensor_plan import BACKWARD, FORWARD, Site
from plait.tensor import parallel_plan

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
