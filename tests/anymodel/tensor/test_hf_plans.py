"""Stock models of transformers under a tensor axis, by the plans that they carry, and by the loss that they compute."""

import copy
import warnings
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from pipeline_cases import build as build_engine
from pipeline_cases import step
from torch import Tensor, nn

import plait
from plait.anymodel import plan_of
from plait.comm import Comm
from plait.run.models import hf
from plait.step import Engine
from plait.tensor import parallel_plan
from plait.tensor import plan_of as own_plan
from plait.zero.state.init import materialise

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 19,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
REST = {"head_dim": 8, "intermediate_size": 13, "max_position_embeddings": 32, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 7}
LATENT = {"q_lora_rank": 9, "kv_lora_rank": 5, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6}

MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": EXPERTS | LATENT | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                                      "num_key_value_heads": 6, "n_group": 1, "topk_group": 1},
    "Qwen3": {},
    "Olmo2": {},
    "Phi3": {},
    "GraniteSWA": {"layer_types": ["sliding_attention", "full_attention"]},
    "Llama4": {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
               "intermediate_size_mlp": 13},
}  # fmt: skip
"""Experts; with latent attention and shared ones; norms on heads; gathered and divided; sinks; experts, transposed."""


def build(name: str) -> Any:
    config = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    torch.manual_seed(0)
    with hf.BUILDING:
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(
            config(**(SIZES | REST | MODELS[name])), attn_implementation="eager", experts_implementation="eager"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.double().train()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(1, 19, (4, 7), generator=torch.Generator().manual_seed(2))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1).masked_fill(tokens.remainder(5) == 0, -100)}


def plain(template: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = copy.deepcopy(template), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = hf.loss_sum(model, batch()) / hf.token_count(batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def steps(template: nn.Module, mesh: str, row: str, loss: Any = hf.loss_sum, **settings: Any) -> list[Any]:
    """Losses of two steps, the state after them, and the messages over the axis."""

    def body(comm: Comm) -> tuple[list[float], dict[str, Tensor], list[str]]:
        how = {"loss_fn": loss, "count_fn": hf.token_count, **settings}
        engine = build_engine(template, comm, strategy=row, optimizer=partial(torch.optim.SGD, lr=0.1), **how)
        losses = [step(engine, batch(), 1).loss for _ in range(2)]
        sent = [f"{e.kind} {e.note.unit}" for e in comm.ledger.entries if e.note.phase.startswith("tensor")]
        return losses, engine.full_state_dict(), sent

    return plait.run_threads(mesh, body)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "in time"])
@pytest.mark.parametrize(("mesh", "row"), [("tensor=3", "ddp"), ("shard=2 tensor=3", "zero3")])
def test_a_stock_model_trains_as_in_plain_pytorch(mesh: str, row: str, sequence: bool, name: str) -> None:
    template = build(name)
    before = {n: p.detach().clone() for n, p in template.named_parameters()}
    losses, wanted = plain(template)

    if sequence and name == "Llama4":
        with pytest.raises(ValueError, match=r"returns \[28, 48\].*leave sequence parallelism out"):
            steps(template, "tensor=3", row, sequence_parallel=True)
        return
    for ours, state, _ in steps(template, mesh, row, sequence_parallel=sequence):
        assert ours == pytest.approx(losses, rel=1e-7)  # routers and norms compute in fp32
        for n, value in wanted.items():
            moved = (value - before[n]).abs().max().item()
            assert (state[n] - value).abs().max().item() <= 1e-6 * moved, n


def test_the_plan_of_a_model_inside_another_is_found() -> None:
    """Gemma3's is that of its text model, under the name that it has there; nothing is said of the vision model."""
    text = transformers.Gemma3TextConfig(**(SIZES | REST))
    vision = {
        "hidden_size": 12,
        "intermediate_size": 9,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
    }
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision | {"patch_size": 4})
    with torch.device("meta"):
        plan = plan_of(transformers.Gemma3ForConditionalGeneration(config))
    assert plan["model.language_model.layers.*.self_attn.q_proj"] == "column"
    assert plan["model.language_model.layers.*.self_attn.q_norm"] == "summed"
    assert {n for n, style in plan.items() if style == "vocabulary"} == {"model.language_model.embed_tokens", "lm_head"}
    assert not any("vision" in name for name in plan)


@pytest.mark.parametrize(("name", "where"), [("DeepseekV2", "self_attn"), ("Mixtral", "mlp")])
def test_what_its_plan_leaves_whole_is_whole_in_time(name: str, where: str) -> None:
    """A latent attention has products that are not cut, a mixture its router."""
    plan = plan_of(build(name), sequence=True)
    assert plan[f"model.layers.1.{where}"] == "unsplit"
    assert plan["model.layers.0"] == "split" and plan["model.norm"] == "sequence"


# ---- Llama and Qwen2, and the loss that they compute ----------------------------------------------------------------

KINDS = ("llama", "qwen2")


def decoder(kind: str) -> nn.Module:
    with plait.empty_parameters():
        model = hf.build(hf.HFConfig(19, 2, 24, 4, 2, 13, 8, 0.0, kind=kind))  # type: ignore[arg-type]
    materialise(model, 1, torch.device("cpu"))
    return model.double().train()


def with_labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, a mean over what its shift leaves, as a sum."""
    loss: Tensor = model(input_ids=batch["tokens"], labels=batch["targets"], use_cache=False).loss
    return loss * int((batch["targets"][:, 1:] != -100).sum())


def agree(ranks: list[Any], single: Any) -> None:
    for losses, state, _ in ranks:
        assert all(abs(a - b) < 1e-12 * abs(b) for a, b in zip(losses, single[0], strict=True))
        assert list(state) == list(single[1])
        assert all(cases.close(state[name], single[1][name], 1e-12) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_its_plan_is_read_as_it_is_and_the_ends_are_cut_by_vocabulary(kind: str) -> None:
    model: Any = decoder(kind)
    plan = own_plan(model)
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
        single = steps(decoder("llama"), "shard=1", "ddp", loss=with_labels)[0]
    with pytest.warns(UserWarning, match="labels=.*logits of the whole vocabulary are gathered"):
        ranks = steps(decoder("llama"), "tensor=2", "ddp", loss=with_labels)
    agree(ranks, single)
    assert all("all_gather lm_head" in sent and "all_reduce loss" not in sent for _, _, sent in ranks)
    assert all("all_gather lm_head" not in sent for _, _, sent in steps(decoder("llama"), "tensor=2", "ddp"))


def test_the_models_own_loss_under_sequence_parallelism() -> None:
    single = steps(decoder("llama"), "shard=1", "ddp", loss=with_labels)[0]
    with pytest.warns(UserWarning, match="labels="):
        agree(steps(decoder("llama"), "tensor=2", "ddp", loss=with_labels, sequence_parallel=True), single)


def logits(sequence: bool, **how: Any) -> list[Tensor]:
    """Whole, of two ranks that evaluate the model; the last ones are of one process."""

    def body(comm: Comm) -> Tensor:
        model = decoder("llama").eval()
        Engine(model, comm, strategy="ddp", sequence_parallel=sequence)
        with torch.no_grad():
            found: Any = model(use_cache=False, **how).logits
        return found.full()

    with torch.no_grad():
        alone: Tensor = decoder("llama").eval()(use_cache=False, **how).logits
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
