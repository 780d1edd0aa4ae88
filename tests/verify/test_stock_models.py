"""Models that were not written for plait: every layout of them equals one process to the bit.

GPT-2, Llama and Qwen2 from transformers, a ResNet with its BatchNorm buffers, and torch's own modules: dropout on,
masks that give ranks and microbatches different numbers of targets (one has none), microbatches of different sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from stock_cases import (
    IGNORED,
    Batch,
    Given,
    ResNet,
    bitwise,
    gpt2,
    images,
    job_of,
    llama,
    resnet_links,
    sequential_net,
    valued,
)
from stock_nets import NETS, Adapted, Lent, vectors
from torch import Tensor, nn

from plait.run.job.job import Job
from plait.run.models import hf
from plait.table.cells import TABLE

ROWS = tuple(TABLE)
MESHES = ("shard=2", "replica=2 shard=2", "shard=3")
HUGGING_FACE = ("gpt2", "llama", "qwen2")


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if any(kind in request.node.name for kind in (*HUGGING_FACE, "hugging")):
        pytest.importorskip("transformers")


@cache
def job(name: str, layers: int = 4) -> Job:
    match name:
        case "gpt2":
            return gpt2(layers)
        case "llama":
            return llama("llama", layers)
        case "qwen2":
            return llama("qwen2", layers, tie=True)
        case "resnet":
            return job_of(linked(valued(ResNet)), images())
        case "sequential":
            return job_of(valued(sequential_net), images())
    build, time = NETS[name]
    return job_of(valued(build), vectors(time))


def linked(build: object) -> object:
    def made() -> nn.Module:
        model: nn.Module = build()  # type: ignore[operator]
        model.pipeline_links = partial(resnet_links, model)  # type: ignore[assignment]
        return model

    return made


# ---- data parallel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", [*HUGGING_FACE, "resnet"])
def test_every_row_on_every_mesh(name: str, row: str, mesh: str) -> None:
    held = bitwise(job(name, layers=2), mesh, row)
    assert max(norm for norm in held.ranks[0].norms if norm is not None) > 0.3, "clipping never came to work"


UNTOLD = ("cell", "twice", "adapters")
"""Nets whose units do not run exactly once per microbatch, which the prediction does not foresee."""


@pytest.mark.parametrize("mesh, row", [("shard=2", "ddp"), ("shard=3", "zero3"), ("replica=2 shard=2", "hpz")])
@pytest.mark.parametrize("name", NETS)
def test_modules_of_torch(name: str, row: str, mesh: str) -> None:
    bitwise(job(name), mesh, row, microbatches=3, foretold=name not in UNTOLD)


@pytest.mark.parametrize("row", ["zero3", "hpz"])
def test_a_unit_that_stays_open_around_others_because_it_is_lent(row: str) -> None:
    units = ["table", "inner", *(f"inner.blocks.{i}" for i in range(3)), "head"]
    bitwise(job_of(valued(Lent), vectors()), "shard=2", row, units=units, foretold=False)


def test_a_frozen_decoder_with_adapters() -> None:
    def build() -> nn.Module:
        model = hf.build(hf.HFConfig(32, 2, 16, 4, 2, 20, 6, 0.1)).requires_grad_(False)
        for layer in model.model.layers:  # type: ignore[union-attr]
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
        return model

    hugging = replace(llama(), build=valued(build))
    for mesh, row, foretold in (("shard=2", "ddp", True), ("shard=3", "zero3", False)):
        held = bitwise(hugging, mesh, row, foretold=foretold)
        assert {name.split(".")[-2] for record in held.ranks for name, *_ in record.gradients[0]} == {"a", "b"}
    bitwise(hugging, "pipe=2 shard=2", "zero3", schedule="zb_h1", foretold=False)


def test_microbatches_without_samples() -> None:
    """A ResNet takes them; Hugging Face's attention reshapes by -1 and does not: there, samples without targets do."""
    for name in ("resnet", "encoder", "lstm"):
        empty = replace(job(name), batches=Given(job(name).batches.steps, least=0))  # type: ignore[attr-defined]
        first = empty.microbatches(0, 0, 3, 3)[0]
        assert len(first["y"]) == 0
        bitwise(empty, "shard=3", "zero3", microbatches=3)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_in_bf16(kind: str) -> None:
    def build() -> nn.Module:
        model = job(kind, layers=2).build()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return model

    half = replace(job(kind, layers=2), build=build, dtype=torch.bfloat16)
    bitwise(half, "shard=3", "zero3")
    bitwise(half, "pipe=2 shard=2", "ddp")


@pytest.mark.parametrize("mesh, row", [("shard=3", "zero3"), ("pipe=2 shard=2", "ddp")])
def test_gpt2_under_autocast(mesh: str, row: str) -> None:
    def lower(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = model(input_ids=batch["tokens"], use_cache=False).logits
        assert logits_BTV.dtype == torch.bfloat16
        targets = batch["targets"].flatten()
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets, reduction="sum", ignore_index=IGNORED)

    bitwise(replace(job("gpt2", layers=2), loss_fn=lower), mesh, row)


# ---- pipelines ----------------------------------------------------------------------------------------------------

LAYOUTS = [
    ("pipe=2 shard=2", "zero3", "1f1b"),
    ("pipe=2 shard=2", "ddp", "zb_h1"),
    ("pipe=2 replica=2", "psdp", "interleaved"),
    ("pipe=2 shard=2", "zero2", "zbv"),
    ("pipe=3", "zero3", "1f1b"),
    ("pipe=3 shard=2", "hsdp", "zb_h1"),
]


@pytest.mark.parametrize("mesh, row, order", LAYOUTS)
@pytest.mark.parametrize("name", [*HUGGING_FACE, "resnet", "sequential"])
def test_pipelines(name: str, mesh: str, row: str, order: str) -> None:
    """Messages are foretold between decoders' stages, where all have one shape; images change theirs."""
    microbatches = 2 if mesh == "pipe=3 shard=2" else 3
    held = bitwise(job(name), mesh, row, schedule=order, microbatches=microbatches, foretold=name in HUGGING_FACE)
    assert bool(held.ranks[0].ties) == (name in ("gpt2", "qwen2"))


@pytest.mark.parametrize("split", [(1, 8), (2, 7), (8, 1)])
def test_gpt2_cut_at_any_link(split: tuple[int, int]) -> None:
    """After the second embedding the stream is not yet the first dropout's input: GPT-2 adds the two in between, and
    both travel, of which the job's width, for the prediction, does not tell."""
    bitwise(job("gpt2"), "pipe=2", split=split, foretold=split == (8, 1))


@pytest.mark.parametrize("split", [(2, 7), (3, 6)])
def test_a_resnet_whose_links_leave_out_a_module_that_writes_in_place(split: tuple[int, int]) -> None:
    def build() -> nn.Module:
        model = job("resnet").build()
        model.pipeline_links = lambda: [n for n in resnet_links(model) if n != "relu"]  # type: ignore[assignment]
        return model

    bitwise(replace(job("resnet"), build=build), "pipe=2", split=split)
