"""What a rank needs, stage by stage: held against counting by hand along its line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.referee.prove import Decoder, PaperRun
from plait.referee.prove.room import _activations, _again, _reduced, room_of
from plait.schedule.actions import Kind, owners
from plait.schedule.pipeline import Pipeline
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

DECODER = Decoder(layers=6, hidden=32, ffn=48, heads=4, kv_heads=2, vocab=701)
"""Its head's logits are most of what it keeps."""


def paper(row: str, order: str, recompute: str | None = None) -> PaperRun:
    pipeline = Pipeline(order, 2)
    how = {"batch": 2, "length": 6, "recompute": recompute}
    return PaperRun(DECODER, Mesh.parse("pipe=2 shard=2"), TABLE[row], pipeline, 4, **how)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"])
def test_activations_in_flight_are_those_of_their_stages(order: str, recompute: str | None) -> None:
    run = paper("zero1", order, recompute)
    schedule, links = run.pipeline.completed(run.microbatches, run.strategy), run.links()
    most = []
    for line in schedule:
        held, peak = set[tuple[int, int]](), 0
        for action in line:
            if action.kind is Kind.FORWARD:
                held.add((action.stage, action.microbatch))
            elif action.kind in (Kind.WEIGHT, Kind.BACKWARD):
                held.discard((action.stage, action.microbatch))
            peak = max(peak, sum(_activations(run, links[stage]) for stage, _ in held))
        stages = {action.stage for action in line if action.kind is Kind.FORWARD}
        most.append(peak + _again(run, [link for stage in stages for link in links[stage]]))
    room = room_of(run, schedule, run.laid())
    assert room.activations == most[run.mesh.coordinates(room.rank)["pipe"]]


def test_each_stage_reduces_in_buffers_of_its_own() -> None:
    run = paper("zero2", "interleaved")
    laid, owner = run.laid(), owners(run.pipeline.completed(run.microbatches, run.strategy))
    units = {stage: laid[stage, 0] for stage in owner if owner[stage] == 0}
    alone = [_reduced(run, {stage: own}) for stage, own in units.items()]
    assert len(alone) == 2 and _reduced(run, units) == sum(alone)


def test_an_mlp_of_two_matrices_keeps_less_than_one_of_three() -> None:
    run = paper("ddp", "1f1b")
    two = replace(run, decoder=replace(DECODER, gated=False))
    assert _activations(two, DECODER.links[1:2]) < _activations(run, DECODER.links[1:2])
