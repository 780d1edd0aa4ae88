"""What ``plait explain`` says of the types of activations is what spmd_types infers of the same layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("spmd_types", reason="pip install spmd_types")

from spmd_types import SpmdTypeError
from typed_layers import WAYS, TypedModel

from plait.anymodel.tensor import resolve_carried
from plait.anymodel.tensor.types import module_types
from plait.run.config import VerifyConfig
from plait.run.job.job import build_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # in spmd_types itself

GPT = VerifyConfig(model="gpt", layers=2, width=24, heads=6, kv_heads=2, batch=4, length=8, steps=1, dropout=0.0)
LLAMA = replace(GPT, model="llama")
MLP = VerifyConfig(model="mlp", layers=5, width=8, batch=7, steps=1, dropout=0.0)
IN_TIME = [replace(config, sequence_parallel=True, mesh=f"tensor={WAYS}") for config in (GPT, LLAMA)]
CASES = [GPT, LLAMA, MLP, *IN_TIME]
IDS = [f"{case.task.network.model}{', in time' if case.layout.sequence_parallel else ''}" for case in CASES]


@pytest.mark.parametrize("config", CASES, ids=IDS)
def test_every_module_reads_and_leaves_what_is_inferred(config: VerifyConfig) -> None:
    model = build_model(config.task)
    parallel = resolve_carried(model, WAYS, sequence=config.layout.sequence_parallel)
    told = {
        one.name: (one.reads, one.leaves)
        for one in module_types(model, parallel, sequence=config.layout.sequence_parallel)
    }
    seen = TypedModel(config).follow()
    assert seen == {name: tuple("cut" if t == "classes" else t for t in types) for name, types in told.items()}


@pytest.mark.parametrize("config", IN_TIME, ids=IDS[3:])
def test_a_gradient_that_is_not_pending_is_refused(config: VerifyConfig) -> None:
    with pytest.raises(SpmdTypeError, match="Invariant"):
        TypedModel(config, pending=False).follow()


@pytest.mark.parametrize("without", ["enter", "leave"])
@pytest.mark.parametrize("config", CASES[:3], ids=IDS[:3])
def test_a_site_that_is_left_out_is_refused(config: VerifyConfig, without: str) -> None:
    with pytest.raises(SpmdTypeError):
        TypedModel(config, without=without).follow()
