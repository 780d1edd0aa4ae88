"""Stock Hugging Face decoders under a tensor axis, by the plan that they carry and by the loss that they compute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from pipeline_cases import engine_on, step
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.run.models import hf
from plait.step import Engine, empty_parameters
from plait.tensor import parallel_plan, plan_of
from plait.zero.state.init import materialise

pytest.importorskip("transformers")

KINDS = ("llama", "qwen2")
Batch = Mapping[str, Tensor]


def sizes(kind: str, tie: bool = False) -> hf.HFConfig:
    return hf.HFConfig(
        vocabulary=19, num_layers=2, width=24, num_heads=4, num_kv_heads=2, hidden=13, max_length=8, dropout=0.0,
        kind=kind, tie=tie,
    )  # fmt: skip


def build(kind: str, tie: bool = False) -> nn.Module:
    with empty_parameters():
        model = hf.build(sizes(kind, tie))
    materialise(model, 1, torch.device("cpu"))
    return model.double().train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 19, (4, 7), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1).masked_fill(tokens.remainder(5) == 0, -100)}


def with_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, a mean over what its shift leaves, as a sum."""
    loss: Tensor = model(input_ids=batch["tokens"], labels=batch["targets"], use_cache=False).loss
    return loss * int((batch["targets"][:, 1:] != -100).sum())


def steps(kind: str, mesh: str, row: str, tie: bool = False, loss: Any = hf.loss_sum, **settings: Any) -> list[Any]:
    def body(comm: Comm) -> tuple[list[float], dict[str, Tensor], list[str]]:
        how = {"strategy": row, "loss_fn": loss, "count_fn": hf.token_count, **settings}
        engine = engine_on(build(kind, tie), comm, optimizer=partial(torch.optim.SGD, lr=0.1), **how)
        losses = [step(engine, batch(), 1).loss for _ in range(2)]
        sent = [f"{e.kind} {e.note.unit}" for e in comm.ledger.entries if e.note.phase.startswith("tensor")]
        return losses, engine.full_state_dict(), sent

    return plait.run_threads(mesh, body)


def agree(ranks: list[Any], single: Any) -> None:
    for losses, state, _ in ranks:
        assert all(abs(a - b) < 1e-12 * abs(b) for a, b in zip(losses, single[0], strict=True))
        assert list(state) == list(single[1])
        assert all(cases.close(state[name], single[1][name], 1e-12) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_its_plan_is_read_as_it_is_and_the_ends_are_cut_by_vocabulary(kind: str) -> None:
    model: Any = build(kind)
    plan = plan_of(model)
    inner = {k.removeprefix("model."): v for k, v in plan.items() if "layers" in k}
    words = {"colwise": "column", "rowwise": "row"}
    assert inner == {k: words[v] for k, v in model.config.base_model_tp_plan.items()}
    assert {k: v for k, v in plan.items() if "layers" not in k} == {
        "model.embed_tokens": "vocabulary",
        "lm_head": "vocabulary",
    }
    styles = parallel_plan(model, 2).styles
    assert str(styles["model.layers.1.self_attn.k_proj"]) == "column by 6", "whole heads"
    assert len(styles) == 2 + 2 * 7


def test_the_models_own_loss_gathers_the_logits_and_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single = steps("llama", "shard=1", "ddp", loss=with_labels)[0]
    with pytest.warns(UserWarning, match="labels=.*logits of the whole vocabulary are gathered"):
        ranks = steps("llama", "tensor=2", "ddp", loss=with_labels)
    agree(ranks, single)
    assert all("all_gather lm_head" in sent and "all_reduce loss" not in sent for _, _, sent in ranks)
    assert all("all_gather lm_head" not in sent for _, _, sent in steps("llama", "tensor=2", "ddp"))


def test_the_models_own_loss_under_sequence_parallelism() -> None:
    single = steps("llama", "shard=1", "ddp", loss=with_labels)[0]
    with pytest.warns(UserWarning, match="labels="):
        agree(steps("llama", "tensor=2", "ddp", loss=with_labels, sequence_parallel=True), single)


def logits(sequence: bool, **how: Any) -> list[Tensor]:
    """Whole, of two ranks that evaluate the model; the last ones are of one process."""

    def body(comm: Comm) -> Tensor:
        model = build("llama").eval()
        Engine(model, comm, strategy="ddp", sequence_parallel=sequence)
        with torch.no_grad():
            found: Any = model(use_cache=False, **how).logits
        return found.full()

    with torch.no_grad():
        alone: Tensor = build("llama").eval()(use_cache=False, **how).logits
    return [*plait.run_threads("tensor=2", body), alone]


def test_code_that_slices_time_on_a_stream_cut_in_time_is_refused() -> None:
    """The last token's logits alone: each rank would take the last token of its part."""
    *found, wanted = logits(False, input_ids=batch()["tokens"], logits_to_keep=1)
    assert all(cases.close(one, wanted, 1e-12) for one in found)
    with pytest.raises(ValueError, match="time"):
        logits(True, input_ids=batch()["tokens"], logits_to_keep=1)


@pytest.mark.parametrize("sequence", [False, True])
def test_padding_is_masked_whether_the_stream_is_cut_or_not(sequence: bool) -> None:
    mask = torch.ones(4, 7, dtype=torch.int64)
    mask[0, :3] = mask[2, :1] = 0
    *found, wanted = logits(sequence, input_ids=batch()["tokens"], attention_mask=mask)
    assert all(cases.close(one[mask.bool()], wanted[mask.bool()], 1e-12) for one in found)
