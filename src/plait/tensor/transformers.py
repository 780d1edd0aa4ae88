"""The tensor plan that a Hugging Face model carries (``model.tp_plan``), in our words.

    its plan                                        plait
    model.layers.*.self_attn.q_proj   colwise       model.layers.*.self_attn.q_proj   column
    model.layers.*.self_attn.o_proj   rowwise       model.layers.*.self_attn.o_proj   row
                                                    model.embed_tokens, lm_head       vocabulary

``anymodel`` translates the styles that are not here, such as experts, and plans for sequence parallelism.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

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
    "replicate": "",
    "embedding_colwise": "",
}
"""Styles of transformers' plans, in our words; an empty one leaves a module whole, which it may be."""

MISTAKEN = {"Gemma3nTextMLP": ("activation_sparsity", "takes the mean of the features that the plan cuts")}
"""Classes of transformers whose plan is wrong if an attribute is set, and why."""


def check_carried(model: nn.Module) -> None:
    """Raises ValueError for a model whose own plan is known to be wrong."""
    for name, module in model.named_modules():
        attribute, why = MISTAKEN.get(type(module).__name__, ("", ""))
        if attribute and getattr(module, attribute):
            raise ValueError(
                f"{type(model).__name__}'s tensor plan is wrong for {name!r}, a {type(module).__name__}, which {why}: "
                f"give tensor_plan=... of your own that leaves it whole, or leave the tensor axis out"
            )


def ends_of(model: Any) -> list[str]:
    """The names of the embedding and of the head."""
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return [name for name, module in modules.items() if any(module is end for end in both)]


def names_in(model: nn.Module, pattern: str, ends: Iterable[str]) -> list[str]:
    """The modules and parameters that a pattern names, apart from the ends.

    A pattern that finds nothing is left out: one plan serves all variants of an architecture.
    """
    names = (*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False)))
    return [name for name in names if fnmatchcase(name, pattern) and name not in ends]


def plan_from_transformers(model: Any, carried: Mapping[str, str], words: Mapping[str, str] = WORDS) -> dict[str, str]:
    """The plan of a whole ``PreTrainedModel`` from the one that it ``carried``, in our ``words``; ValueError for an
    unknown style."""
    check_carried(model)
    ends = ends_of(model)
    found = {pattern: style for pattern, style in carried.items() if names_in(model, pattern, ends)}
    if unknown := sorted({style for style in found.values() if style not in words}):
        more = "plait.anymodel.plan_of(model), which knows more, or " if words is WORDS else ""
        raise ValueError(
            f"{type(model).__name__}'s tensor plan has the style {unknown[0]!r}, which plait has no word for "
            f"(it knows {', '.join(words)}): give tensor_plan={more}your own plan"
        )
    plan = {pattern: words[style] for pattern, style in found.items() if words[style]}
    return plan | dict.fromkeys(ends, "vocabulary")
