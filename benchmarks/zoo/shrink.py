"""One function that makes any config of transformers small, by the names of its fields.

    {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "layer_types": ["linear", "linear", "full", ...]}
    {"hidden_size": 64,   "num_attention_heads": 4,  "head_dim": 16,  "layer_types": ["linear", "full", ...4 of them]}

A field's name says what it counts: layers, features, heads, experts, tokens.  No architecture is named here.
Numbers only become smaller.  The chosen layers include each kind, and lists that run over the layers are cut in the
same way.  Random numbers (dropout, jitter) are off, so that a run can be compared with another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

LAYERS = 4
VOCABULARY = 128
SPECIAL = 96
"""The first special token: above the tokens of the batches."""
WIDTH = 64
HEADS = 4
HEAD_DIM = WIDTH // HEADS

NUM_LAYERS = re.compile(
    r"^(num_)?((text|vision|speech|t2u|entity)_)*(hidden_|encoder_|decoder_|encoder_hidden_|decoder_hidden_|global_)?layers$"
    r"|^n_layers?$|^num_blocks$|^depth$|^(speech_|t2u_)?(en|de)coder_layers$|^conf_num_hidden_layers$"
    r"|^num_(hidden|encoder|decoder)_layers$|^num_self_attends_per_block$"
)
NUM_HEADS = re.compile(r"(^|_)(num|n)_([a-z]+_)*heads?$|attention_heads$|^num_([a-z]+_)*attention_heads$")

LARGEST: tuple[tuple[str, int], ...] = (
    (r"^(kernel|conv|patch|num_conv|mask_time|mask_feature).*", 1 << 30),
    (r"^(image_size|crop_size)$", 64),
    (r"vocab_size(_base)?$|_vocab$|vocab_size_per_layer_input|codebook_size|num_centroids", VOCABULARY),
    (r"max_.*position|n_positions|n_ctx|max_seq_len|max_pos_emb|context_length|max_length|local_attention|"
     r"sliding_window(_size)?$|attention_window(_size)?$|local_attention_window|keep_window_size", 64),
    (r"chunk_size$|chunk_length$", 8),
    (r"experts_per_tok|top_?k(_blocks|_prob)?$|moe_k$|intermediate_top_k", 2),
    (r"n_group$|topk_group|shared_experts$|num_expert_group$", 1),
    (r"first_k_dense_replace|num_dense_layers|kv_shared_layers", 1),
    (r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|zero_expert_num", HEADS),
    (r"num_codevectors_per_group", HEADS),
    (r"qk_head_dim$", 2 * HEAD_DIM),
    (r"rotary_dim$", HEAD_DIM // 2),
    (r"head_dim$|head_dim_|^d_kv$|^dim_head$|head_size$|kv_channels|d_head$|_headdim$|^dim_head$", HEAD_DIM),
    (r"lora_rank|_rank$|^d_rel$", HEAD_DIM),
    (r"n_groups$|ngroups$|num_query_groups|num_groups$", 2),
    (r"layer_period$|sparse_step$|every_n_layers|layer_interval|layer_step$|layer_group_size", 2),
    (r"sliding_window_pattern", 2),
    (r"layer_offset$|max_window_layers|moe_layer_start_index", 1),
    (r"state_size$|d_state$", HEAD_DIM),
    (r"intermediate_size|ffn_dim|^d_ff$|dff$|^d_inner|dim_ff|feed_forward_size|ffn_hidden_size|mlp_dim", 96),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_(size|dim)|emb_dim|emb_size|^dim$|lru_width|word_embed_proj_dim|"
     r"projection_dim|proj_size|feature_size|hidden_dim|bottleneck_size|d_latents|codevector_dim|_dim$|^input_size$|"
     r"_input_size$|output_size$|hidden_dimension$|conv_channels$|pw_out_channel$|_channel$", WIDTH),
    (r"num_latents|num_landmarks|segment_means_seq_len|num_global_tokens", 8),
)  # fmt: skip
"""Patterns of names and the most that such a field may be; the first that fits holds."""
RULES = [(re.compile(pattern), most) for pattern, most in LARGEST]

LEFT_OPEN = re.compile(r"experts_per_tok(en)?$|n_routed_experts$|n_shared_experts$|^head_dim$")
FOLLOWS = ("out_features", "out_indices", "stage_names", "use_cache")
"""Fields that the others decide; nothing is cached while a model trains."""
NOISE = re.compile(r"drop|jitter|_noise|mask_(time|feature)_prob")
INDICES = re.compile(r"layer_ids$|_idxs$|_layers$|_indices$|_indexes$")
WIDTHS = re.compile(r"hidden_sizes|embed_dims?$|base_attn_unit_dims|^conv_dim$|^tdnn_dim$")
TOKEN = re.compile(r"_token_ids?$|_token_index$|_index$|_id$|vocab_offset")


def shrink(fields: Mapping[str, Any], *, narrow: bool = True) -> dict[str, Any]:
    """A config's fields, made small, with those of inner configs.

    ``narrow``: features, heads and images too, not only layers, tokens and experts.
    """
    kept = _layers_kept(fields)
    small = {}
    for name, value in fields.items():
        if name in FOLLOWS:
            continue
        if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
            small[name] = _by_layer(value, kept, narrow)
        elif isinstance(value, Mapping):
            small[name] = shrink(value, narrow=narrow)
        elif isinstance(value, list | tuple):
            small[name] = _list(name, list(value), kept, narrow)
        else:
            small[name] = _scalar(name, value, fields, narrow)
    return small | ({"use_cache": False} if "use_cache" in fields else {})


def _layers_kept(fields: Mapping[str, Any]) -> dict[int, list[int]]:
    """For each number of layers, which ones stay: each kind once, and then from the end."""
    kept = {}
    for number in {v for n, v in fields.items() if NUM_LAYERS.search(n) and isinstance(v, int) and v > LAYERS}:
        lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == number]
        kinds: dict[str, int] = {}
        for index in range(number):
            kinds.setdefault(str([v[index] for v in lists]), index)
        chosen = list(kinds.values())[:LAYERS]
        for index in reversed(range(number)):
            if len(chosen) < LAYERS and index not in chosen:
                chosen.append(index)
        kept[number] = sorted(chosen)
    return kept


def _by_layer(fields: Mapping[str, Any], kept: Mapping[int, list[int]], narrow: bool) -> dict[str, Any]:
    """The settings of single layers, under their new numbers."""
    chosen = next(iter(kept.values()), list(range(LAYERS)))
    return {
        str(chosen.index(int(key))): shrink(value, narrow=narrow) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if int(key) in chosen
    }


def _list(name: str, values: list[Any], kept: Mapping[int, list[int]], narrow: bool) -> Any:
    if NOISE.search(name):
        return [0.0 for _ in values]
    if len(values) in kept:
        return [_scalar(name, values[i], {}, narrow) for i in kept[len(values)]]
    ints = bool(values) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if ints and INDICES.search(name):
        return [v for v in values if v < LAYERS] or [1]
    if ints and TOKEN.search(name):
        return [_scalar(name, v, {}, narrow) for v in values]
    if ints and name == "depths":
        return [min(v, 2) for v in values]
    if not narrow:
        return values
    if ints and name.endswith("section"):  # of rotary positions: shares of half a head
        return _shares(values, HEAD_DIM // 2)
    if ints and NUM_HEADS.search(name):
        return [max(1, v // min(values)) for v in values]
    if ints and WIDTHS.search(name):
        return [v // _divisor(values) for v in values]
    return values


def _shares(values: Sequence[int], whole: int) -> list[int]:
    """Integers in about the same proportion, with another sum."""
    shares = [max(1, v * whole // sum(values)) for v in values]
    shares[0] += whole - sum(shares)
    return shares


def _divisor(values: Sequence[int]) -> int:
    """The largest power of two that divides all and leaves at least 8."""
    divisor = 1
    while all(v % (2 * divisor) == 0 and v // (2 * divisor) >= 8 for v in values):
        divisor *= 2
    return divisor


def _scalar(name: str, value: Any, beside: Mapping[str, Any], narrow: bool) -> Any:
    if isinstance(value, float) and NOISE.search(name):
        return 0.0
    if value is None and LEFT_OPEN.search(name):  # left open, where the model cannot do without
        return next(most for pattern, most in RULES if pattern.search(name))
    if value is None and name == "layer_types":
        return ["full_attention"] * LAYERS
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if TOKEN.search(name):
        return value if value < VOCABULARY // 2 else SPECIAL + value % (VOCABULARY - SPECIAL - 1)
    if NUM_LAYERS.search(name):
        return min(value, LAYERS)
    for pattern, most in RULES:
        if pattern.search(name):
            return min(value, most) if narrow or most == VOCABULARY else value
    if not narrow:
        return value
    if NUM_HEADS.search(name):
        return _heads(name, value, beside)
    return value


def _heads(name: str, value: int, beside: Mapping[str, Any]) -> int:
    """The number of heads that keeps their features in proportion to the width (state spaces have more), and groups."""
    width = next((v for n, v in beside.items() if n in ("hidden_size", "d_model", "n_embd") and isinstance(v, int)), 0)
    prefix = re.sub(r"(num_|n_)?(key_value_|kv_)?(attention_)?heads?$", "", name)
    sizes = [v for n, v in beside.items() if n in (f"{prefix}head_dim", f"{prefix}d_head") and isinstance(v, int)]
    if re.search(r"kv|key_value", name):
        whole = max([v for n, v in beside.items() if NUM_HEADS.search(n) and isinstance(v, int)], default=value)
        return HEADS if value == whole else min(value, 2)
    if sizes and width and not prefix.startswith("qk"):
        return min(value, HEADS * max(1, round(value * sizes[0] / width)))
    return min(value, HEADS)
