"""Plans that stock models of transformers carry, style by style, against plain PyTorch: losses and all parameters."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_cases import build as build_engine
from pipeline_cases import step
from torch import Tensor, nn

import plait
from plait.anymodel import plan_of
from plait.comm import Comm
from plait.run.models import hf

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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "in time"])
@pytest.mark.parametrize(("mesh", "row"), [("tensor=3", "ddp"), ("shard=2 tensor=3", "zero3")])
def test_a_stock_model_trains_as_in_plain_pytorch(mesh: str, row: str, sequence: bool, name: str) -> None:
    template = build(name)
    before = {n: p.detach().clone() for n, p in template.named_parameters()}
    losses, wanted = plain(template)

    def body(comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
        how = {"loss_fn": hf.loss_sum, "count_fn": hf.token_count, "sequence_parallel": sequence}
        engine = build_engine(template, comm, strategy=row, optimizer=partial(torch.optim.SGD, lr=0.1), **how)
        return [step(engine, batch(), 1).loss for _ in range(2)], engine.full_state_dict()

    if sequence and name == "Llama4":
        with pytest.raises(ValueError, match=r"returns \[28, 48\].*leave sequence parallelism out"):
            plait.run_threads("tensor=3", body)
        return
    for ours, state in plait.run_threads(mesh, body):
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
