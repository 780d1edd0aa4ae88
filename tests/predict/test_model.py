"""The model and the cluster of which a plan speaks, and how they are read."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from plait.predict.cluster import PRESETS, parse_cluster, preset
from plait.predict.model import HF_FAMILIES, Transformer, from_hugging_face

CONFIG = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "vocab_size": 71}
LLAMA = {"model_type": "llama"} | CONFIG
GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 17, "vocab_size": 71, "n_inner": None}


EXPERTS = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 40},
    "deepseek_v3": {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                    "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12,
                    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
}  # fmt: skip


@pytest.mark.parametrize("family", HF_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_it_has_the_parameters_of_transformers(family: str, *, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = (GPT2 if family == "gpt2" else CONFIG | EXPERTS.get(family, {})) | {"tie_word_embeddings": tied}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    found = from_hugging_face(json.dumps(config | {"model_type": family} | _head_dim(family)), "config.json")
    assert found.num_parameters == sum(p.numel() for p in model.parameters())


def _head_dim(family: str) -> dict[str, int]:
    return {"head_dim": 128} if family == "qwen3" else {}  # that family's default


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n "a": 1,\n}', "config.json, line 3: no JSON"),
        ("[]", "config.json, line 1: a list"),
        (f'{{"a": {"9" * 5000}}}', "config.json: no JSON: Exceeds the limit"),
        ('{"model_type": ["llama"]}', "config.json, line 1, model_type: ['llama']: did you mean llama?"),
        ('{\n\n "model_type": "llame"}', "config.json, line 3, model_type: 'llame': did you mean llama?"),
        ('{"model_type": "llama", "hidden_size": 32}', "config.json, num_attention_heads: missing"),
        (
            LLAMA | {"vocab_size": "many"},
            "config.json, line 8, vocab_size: 'many': give a whole number from 1 to 1,099",
        ),
        (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no': give true or false"),
        (LLAMA | {"num_attention_heads": 5}, "config.json, line 6, num_attention_heads: hidden 32 is no multiple of 5"),
    ],
)
def test_a_wrong_config_is_named_with_line_and_field(text: str | dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        from_hugging_face(text if isinstance(text, str) else json.dumps(text, indent=0), "config.json")


def test_a_token_computes_in_the_experts_that_it_passes() -> None:
    dense = Transformer(layers=2, hidden=8, ffn=3 * 12, heads=2, kv_heads=2, vocab=10)
    sparse = Transformer(layers=2, hidden=8, ffn=12, heads=2, kv_heads=2, vocab=10, experts=16, chosen=3)
    assert sparse.flops(5) == dense.flops(5) and sparse.active_ffn == dense.ffn
    assert sparse.num_parameters - dense.num_parameters == 2 * (13 * 3 * 8 * 12 + 8 * 16)
    with pytest.raises(ValueError, match="a token passes 17 of 16 experts"):
        replace(sparse, chosen=17)
    text = json.dumps(CONFIG | EXPERTS["qwen3_moe"] | {"model_type": "qwen3_moe", "mlp_only_layers": [1]}, indent=0)
    with pytest.raises(ValueError, match=r"line \d+, mlp_only_layers: \[1\]: only models with experts in every block"):
        from_hugging_face(text, "config.json")


def test_flops_are_those_of_palm() -> None:
    model = Transformer(layers=2, hidden=8, ffn=12, heads=2, kv_heads=2, vocab=10)
    weights = 2 * (4 * 8 * 8 + 3 * 8 * 12) + 10 * 8
    assert model.flops(5) == 6 * weights + 12 * 2 * 8 * 5


WHOLE = """
memory_gb = 80
memory_gbs = 2000
units = 108
[tflops]
bf16 = 312
[inside]
gbs = 300
latency_us = 3
[between]
gbs = 100
latency_us = 10
"""


def test_a_preset_the_same_with_other_figures_and_a_cluster_without_one() -> None:
    assert preset("4xh100", 3).size == 12 and preset("gb200").devices == 72
    found = parse_cluster('preset = "h100"\nhosts = 2\n[between]\ngbs = 50\n[reached]\nproduct = 0.6', "my.toml")
    assert found.size == 16 and found.between.bandwidth == 50e9 and found.reached.product == 0.6
    assert found.inside == PRESETS["h100"].inside and found.peak("bf16") == 989.4e12
    found = parse_cluster(WHOLE, "my.toml")
    assert found.device.memory == 80e9 and found.inside.latency == 3e-6 and found.peak("bf16") == 312e12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "my.toml: no TOML: Invalid value (at end of document)"),
        ("memory_gb = 3", "my.toml, memory_gbs: missing"),
        ('\npreset = "h1000"', "my.toml, line 2, preset: 'h1000': choose one of rtx4090"),
        (f"a = {'9' * 5000}", "my.toml: no TOML: Exceeds the limit"),
        ('preset = "h100"\nhosts = 1.5', "my.toml, line 2, hosts: 1.5: give a whole number above 0, to 65536"),
        ("hosts = 65537", "my.toml, line 1, hosts: 65537: give a whole number above 0, to 65536"),
        ('preset = "h100"\n[inside]\ngbps = 5', "my.toml, line 3, gbps: unknown: did you mean gbs?"),
        ('preset = "h100"\nmemory = 5', "my.toml, line 2, memory: unknown: did you mean memory_gb"),
        (WHOLE.replace("gbs = 100", "gbs = -1"), "my.toml, line 11, gbs: -1: give a number above 0"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_field(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_cluster(text, "my.toml")


@pytest.mark.parametrize("text", ["h1000", "x", "0xh100", "8x", "8 h100"])
def test_an_unknown_accelerator(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpus .* the names are rtx4090, a100-40"):
        preset(text)
