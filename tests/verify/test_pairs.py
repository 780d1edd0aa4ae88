"""What the pairs of a product still hold: every fault of the table turns one of them red.

The table says for each fault which layout shows it, and where.  Here nothing is said: the cases that the full
layer keeps of the products in test_bitwise.py, test_pipelines.py and test_tensor.py are gone through until one is not
as due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import tensor_faults
from fault_table import DATA, PIPELINES, TENSOR, Fault, Put
from pipe_cases import CHAIN, DECODER
from test_bitwise import MESHES, ROWS
from test_pipelines import BESIDE, PIPES
from test_tensor import MESHES as TENSOR_MESHES
from verify_cases import MODELS, job_of, judged, record

from plait.referee.verify.cases import due
from plait.referee.verify.covering import covering
from plait.run.config import VerifyConfig
from plait.schedule.orders import ORDERS


def data_cases() -> Iterator[VerifyConfig]:
    """Of ``test_row_is_bitwise_its_reference``."""
    names = {"model": tuple(MODELS), "microbatches": (1, 3), "mesh": MESHES, "strategy": ROWS}
    for case in covering(names):
        yield replace(MODELS[str(case.pop("model"))], steps=3, **case)  # type: ignore[arg-type]


def pipeline_cases() -> Iterator[VerifyConfig]:
    """Of every row on a decoder, on every pipeline rank, of one row under every order, and of orders and sizes."""
    beside = replace(DECODER, mesh="pipe=2 replica=2 shard=2")
    for job, later, microbatches in ((beside, 2, 3), (replace(CHAIN, mesh=beside.mesh, batch=21), 8, 5)):
        for at, row in enumerate(ROWS):
            order = BESIDE[(at + later) % len(BESIDE)]
            yield replace(job, schedule=order, strategy=row, microbatches=microbatches)
    for order in ORDERS:
        yield replace(CHAIN, mesh="pipe=3 shard=3", schedule=order, strategy="zero3", microbatches=4)
    for job, counts in ((DECODER, (5, 6, 7, 8)), (CHAIN, (5, 7, 8))):
        for case in covering({"schedule": tuple(ORDERS), "pipe": PIPES, "microbatches": counts}):
            yield replace(job, mesh=f"pipe={case.pop('pipe')}", **case)  # type: ignore[arg-type]


def tensor_cases() -> Iterator[VerifyConfig]:
    """Of ``test_pairs_of_layers_with_biases`` and ``test_every_row_is_the_single_process``."""
    for mesh in ("tensor=2", "tensor=3"):
        yield replace(tensor_faults.DEEP, mesh=mesh, strategy="zero3", microbatches=2)
    ways = ((False, 1), (True, 3))
    for case in covering({"way": ways, "mesh": TENSOR_MESHES, "strategy": ROWS}):
        mesh, (sequence, microbatches) = str(case["mesh"]), case["way"]  # type: ignore[misc]
        job = tensor_faults.FOUR if "tensor=4" in mesh else tensor_faults.GPT
        layout = {"mesh": mesh, "strategy": case["strategy"], "sequence_parallel": sequence}
        yield replace(job, microbatches=microbatches, **layout)


def red(configs: Iterable[VerifyConfig], fault: Put) -> VerifyConfig | None:
    """The first layout that raises, or earns another verdict than is due, with the fault in place."""
    for config in configs:
        job_of(config)
        with pytest.MonkeyPatch.context() as broken:
            fault(broken)
            try:
                ranks = record(config)
            except Exception:
                return config
        if judged(config, ranks).verdict.word != due(config):
            return config
    return None


def faults_of(table: list[Fault]) -> list[pytest.ParameterSet]:  # type: ignore[type-arg]
    return [pytest.param(put, id=put.__name__) for put in dict.fromkeys(fault.put for fault in table)]


@pytest.mark.parametrize("fault", faults_of(DATA))
def test_pairs_of_rows_and_meshes(fault: Put) -> None:
    assert red(data_cases(), fault) is not None


@pytest.mark.parametrize("fault", faults_of(PIPELINES))
def test_pairs_of_orders_and_sizes(fault: Put) -> None:
    assert red(pipeline_cases(), fault) is not None


@pytest.mark.parametrize("fault", faults_of(TENSOR))
def test_pairs_of_rows_and_tensor_meshes(fault: Put) -> None:
    assert red(tensor_cases(), fault) is not None
