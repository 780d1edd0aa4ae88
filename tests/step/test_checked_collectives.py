"""``check_collectives`` under an engine: one rank leaves out, doubles or alters one operation of a step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import engine_cases as cases
import pipeline_cases
import pytest
import tensor_models
from torch import nn

from plait.comm import DONE, AbortedError, Comm, MismatchError, Work, run
from plait.comm.operation import Prepared
from plait.referee.sanitize.collectives import COMM, check_collectives
from plait.table.mesh import Mesh

ODD = 1
NAMED = r"rank 1: .* at \w+/\w+.py:\d+, called from step/\w+.py:\d+"


def harmed(comm: Comm, kind: str, harm: str) -> None:
    """From here on, the next operation of this kind is left out, asked for twice, or for another unit."""
    begin, armed = comm.begin, [True]

    def otherwise(prepared: Prepared) -> Work:
        operation = prepared.operation
        if operation.kind != kind or operation.note.phase in ("count", "report") or not armed:
            return begin(prepared)
        armed.clear()
        if harm == "skipped":
            return DONE
        if harm == "doubled":
            begin(prepared).wait()
            return begin(prepared)
        another = replace(operation, note=replace(operation.note, unit="another"))
        return begin(Prepared(comm, prepared.entry, another, prepared.what, prepared.method))

    otherwise.__code__ = otherwise.__code__.replace(co_filename=COMM + "base.py")  # no line of its own
    comm.begin = otherwise


def told(template: nn.Module, mesh: str, row: str, kind: str, harm: str, batches: Any, **settings: Any) -> list[str]:
    """Words of each rank in the step of the harm, its own or those that it heard of another."""

    def body(comm: Comm) -> str:
        check_collectives(comm)
        engine = pipeline_cases.build(template, comm, strategy=row, **settings)
        first, second = (cases.deal(batch, comm.mesh, comm.rank, 4) for batch in batches(2))
        engine.step(first)
        if comm.rank == ODD:
            harmed(comm, kind, harm)
        with pytest.raises((MismatchError, AbortedError)) as caught:
            engine.step(second)
        assert engine.steps == 1, "not in the step"
        return str(caught.value)

    return run(Mesh.parse(mesh), body, deadline=3600)  # at once: the test would end before a wait of so long


DATA = cases.net(), cases.batches
STAGES = pipeline_cases.chain(), cases.batches
CUT = tensor_models.model(), tensor_models.token_batches


@pytest.mark.parametrize(
    ("job", "mesh", "row", "kind", "harm"),
    [
        (DATA, "shard=2", "ddp", "all_reduce", "skipped"),
        (DATA, "shard=3", "zero3", "all_gather", "skipped"),
        (DATA, "replica=2 shard=2", "hsdp", "reduce_scatter", "another"),
        (STAGES, "pipe=2 replica=2", "zero2", "reduce_scatter", "doubled"),
        (CUT, "tensor=2", "zero3", "all_reduce", "skipped"),
        (CUT, "shard=2 tensor=2", "zero3", "all_reduce", "another"),
    ],
)  # fmt: skip
def test_every_rank_is_told_in_the_same_step(job: Any, mesh: str, row: str, kind: str, harm: str) -> None:
    settings = {"schedule": "gpipe"} if "pipe" in mesh else {}
    for text in told(job[0], mesh, row, kind, harm, job[1], **settings):
        assert re.search(NAMED, text), text
