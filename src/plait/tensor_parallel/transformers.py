"""The tensor plan that a Hugging Face model carries (``model.tp_plan``), in our words.

    its plan                                        plait
    model.layers.*.self_attn.q_proj   colwise       model.layers.*.self_attn.q_proj   column
    model.layers.*.self_attn.o_proj   rowwise       model.layers.*.self_attn.o_proj   row
    model.layers.*.mlp.experts        moe_tp_...    model.layers.*.mlp.experts        experts 32|2
                                                    model.embed_tokens, lm_head       vocabulary

It knows nothing of sequence parallelism, under which the first block cuts the stream in time,
attention enters as a whole (its code shapes the heads by the length of its input), and the other modules with
parameters of their own, the norms, work on the cut stream.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch import nn

from plait.core.tensor_plan import match_styles

WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "packed_colwise": "column in 2",
    "packed_rowwise": "row in 2",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "divided",
    "rowwise_rep": "divided",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "summed",
    "moe_tp_experts": "experts",
    "all_reduce": "experts",
    "moe_identity_expert": "once",
    "mla_kv_a_proj": "rope",
    "local_params": "local",
    "replicate": "",
    "embedding_colwise": "",
}
"""Styles of transformers' plans, in our words; an empty one leaves a module whole, which it may be."""

ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""How configs call the number of experts of a token."""


def plan_from_transformers(model: Any, carried: Mapping[str, str], *, sequence: bool) -> dict[str, str]:
    """The plan of a whole ``PreTrainedModel`` from that which it ``carried``; raises ValueError for an unknown style.

    What names nothing in this model is left out: one plan serves all variants of an architecture.
    """
    if unknown := sorted({style for style in carried.values() if style not in WORDS}):
        raise ValueError(
            f"{type(model).__name__}'s tensor plan has the style {unknown[0]!r}, which plait has no word for "
            f"(it knows {', '.join(WORDS)}): give tensor_plan=... of your own"
        )
    modules: dict[str, nn.Module] = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ends = [name for name, module in modules.items() if module in _ends(model)]
    plan = {}
    for pattern, style in carried.items():
        names = [name for name in (*modules, *parameters) if fnmatchcase(name, pattern) and name not in ends]
        word = WORDS[style]
        if word in ("experts", "rope"):
            plan |= {name: _size(model, name, word) for name in names}
        elif word and names:
            plan[pattern] = word
    plan |= dict.fromkeys(ends, "vocabulary")
    if not sequence:
        return plan
    named = match_styles(plan, modules, ())
    parents = {name: name.rpartition(".")[0] for name in modules}
    attention = {parents[name] for name in named if hasattr(modules[parents[name]], "head_dim")}
    left = {name for name in modules.keys() - named.keys() if parents[name] not in attention}
    norms = {name for name in left if modules[name]._parameters}
    first = next(f"{name}.0" for name, module in modules.items() if isinstance(module, nn.ModuleList))
    return plan | dict.fromkeys(attention, "enter") | dict.fromkeys(norms, "sequence") | {first: "split"}


def _ends(model: Any) -> Iterable[nn.Module]:
    return [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]


def _size(model: Any, name: str, word: str) -> str:
    """The number that goes with a style, where there is one."""
    module = model.get_submodule(name)
    if word == "rope":
        return f"rope {model.get_submodule(name.rpartition('.')[0]).qk_rope_head_dim}"
    if len(signature(module.forward).parameters) == 1:
        return word
    config = model.config.get_text_config()
    known = [count for key in ROUTED if isinstance(count := vars(config).get(key), int)]
    if not known:
        raise ValueError(
            f"{type(model).__name__}'s tensor plan has experts in {name!r}, and its config does not say how many each "
            f"token goes to ({', '.join(ROUTED)}): give tensor_plan=... of your own"
        )
    return f"{word} {known[0]}"
