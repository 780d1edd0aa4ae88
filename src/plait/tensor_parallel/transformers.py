"""The tensor plan that a Hugging Face model carries in its config, in our words.

    base_model_tp_plan                              plait
    layers.*.self_attn.q_proj   colwise             model.layers.*.self_attn.q_proj   column
    layers.*.self_attn.o_proj   rowwise             model.layers.*.self_attn.o_proj   row
                                                    model.embed_tokens, lm_head       vocabulary

It covers the blocks and knows nothing of sequence parallelism, under which the first block cuts the stream in time,
attention enters as a whole (its code shapes the heads by the length of its input), and the other modules with
parameters of their own, the norms, work on the cut stream.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from plait.core.tensor_plan import match_styles

WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "replicated_with_grad_allreduce": "summed",
}
"""Styles of transformers' plans, in our words."""


def plan_from_transformers(model: Any, blocks: Mapping[str, str], *, sequence: bool) -> dict[str, str]:
    """The plan of a whole ``PreTrainedModel`` from that of its ``blocks``; raises ValueError for an unknown style."""
    if unknown := sorted({style for style in blocks.values() if style not in WORDS}):
        raise ValueError(
            f"{type(model).__name__}'s base_model_tp_plan has the style {unknown[0]!r}, which plait has no word for "
            f"(it knows {', '.join(WORDS)}): give tensor_plan=... of your own"
        )
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    plan = {prefix + pattern: WORDS[style] for pattern, style in blocks.items()}
    plan |= {name: "vocabulary" for name, module in modules.items() if any(module is end for end in ends)}
    if not sequence:
        return plan
    named = match_styles(plan, modules, ())
    parents = {name: name.rpartition(".")[0] for name in modules}
    attention = {parents[name] for name in named if hasattr(modules[parents[name]], "head_dim")}
    left = {name for name in modules.keys() - named.keys() if parents[name] not in attention}
    norms = {name for name in left if modules[name]._parameters}
    first = next(f"{name}.0" for name, module in modules.items() if isinstance(module, nn.ModuleList))
    return plan | dict.fromkeys(attention, "enter") | dict.fromkeys(norms, "sequence") | {first: "split"}
