"""Tensor plans of unmodified models: more styles, and the plans of Hugging Face models (``model.tp_plan``).

    its plan                                        plait
    model.layers.*.self_attn.q_proj   colwise       model.layers.*.self_attn.q_proj   column
    model.layers.*.self_attn.o_proj   rowwise       model.layers.*.self_attn.o_proj   row
                                                    model.embed_tokens, lm_head       vocabulary

Such a plan does not provide for sequence parallelism.  Under it the first block cuts the stream in time, attention gets
it whole (its code shapes the heads by the length of its input), and norms work on the cut stream.  A child of a block
that contains anything else (a router, a convolution, a product that the plan leaves whole) gets the stream whole.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch import nn

from plait import tensor
from plait.anymodel.experts import without_experts
from plait.anymodel.tensor.kinds import MORE_KINDS
from plait.table.tensor_plan import Style, match_styles
from plait.tensor import Parallel


class ModelPlan(tensor.TensorPlan):
    """A plan that may have styles of ``kinds``."""

    kinds = MORE_KINDS


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
    "moe_tp_experts": "experts",
    "all_reduce": "experts",
    "moe_identity_expert": "once",
    "mla_kv_a_proj": "shared",
    "local_params": "local",
}
"""Styles of these plans in plait's words; an empty one leaves a module whole, which is allowed."""

MISTAKEN = {"Gemma3nTextMLP": ("activation_sparsity", "takes the mean of the features that the plan cuts")}
"""Classes of transformers whose plan is wrong if an attribute is set, and the reason."""

CLOSED = {"column", "row", "gathered", "divided", "summed", "local"}
"""A module that has only these inside reads a stream that is cut in time, and returns one."""

ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Names in configs for the number of experts of a token."""


def plan_of(model: nn.Module, *, sequence: bool = False) -> ModelPlan:
    """The plan that a model carries, its own or a Hugging Face plan; raises ValueError if it has no readable plan."""
    return ModelPlan(tensor.plan_of(model, sequence=sequence))


def resolve_carried(model: nn.Module, ways: int, *, sequence: bool = False) -> Parallel:
    """The plan that a model carries, resolved for an axis of ``ways`` ranks."""
    return tensor.parallel_plan(model, ways, plan_of(model, sequence=sequence), sequence=sequence)


def translated(model: Any, *, sequence: bool) -> ModelPlan:
    """Translates a Hugging Face model's plan into plait's words.

    Raises:
        ValueError: an unknown style, or a plan that is known to be wrong.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        attribute, why = MISTAKEN.get(type(module).__name__, ("", ""))
        if attribute and getattr(module, attribute):
            raise ValueError(
                f"{type(model).__name__}'s tensor plan is wrong for {name!r}, a {type(module).__name__}, which {why}: "
                f"give your own tensor_plan=... that leaves it whole, or leave the tensor axis out"
            )
    both = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [name for name, module in modules.items() if any(module is end for end in both)]
    plan: dict[str, str | Style] = {}
    for pattern, style in model.tp_plan.items():
        if not (names := _names_in(model, pattern, ends)):
            continue
        if style not in WORDS:
            raise ValueError(
                f"{type(model).__name__}'s tensor plan has the style {style!r}, which plait has no word for (it knows "
                f"{', '.join(WORDS)}): give your own tensor_plan=..."
            )
        counted = WORDS[style] in ("experts", "shared", "local")
        plan |= {name: _counted(model, name, WORDS[style]) for name in names} if counted else {pattern: WORDS[style]}
    plan = {name: style for name, style in plan.items() if style} | dict.fromkeys(ends, "vocabulary")
    if sequence:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        plan |= _in_time(model, modules, match_styles(plan, modules, parameters, MORE_KINDS))
    return ModelPlan(without_experts(model, plan))


def _names_in(model: nn.Module, pattern: str, ends: Iterable[str]) -> list[str]:
    """The modules and parameters that a pattern names, except for those in ``ends``.

    A pattern that finds nothing is left out: one plan serves all variants of an architecture.
    """
    names = (*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False)))
    return [name for name in names if fnmatchcase(name, pattern) and name not in ends]


def _in_time(model: Any, modules: Mapping[str, nn.Module], named: Mapping[str, Style]) -> dict[str, str]:
    """The styles that sequence parallelism needs: where the stream is cut in time, and whether each child of a block
    works on the cut stream or gets it whole.  Raises ValueError for parameters whose place is unknown."""
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    lists = [name for name in lists if not any(name.startswith(f"{outer}.") for outer in lists)]
    lists = [name for name in lists if any(n.startswith(f"{name}.") for n in named)]
    children = {child: block for name in lists for block in _called(modules, name) for child in _called(modules, block)}
    found: dict[str, str] = {}
    for name, module in modules.items():
        child = next((c for c in children if f"{name}.".startswith(f"{c}.")), "")
        if child in ("", name) and "Norm" in type(module).__name__ and name not in named:
            found[name] = "sequence"
        elif module._parameters and name not in named and child:
            found[child] = "unsplit"
        elif name == child and name in named and named[name].kind == "experts":
            raise ValueError(_unknown(model, name, "is called by its block, which flattens the stream for it"))
        elif module._parameters and name not in named:
            raise ValueError(_unknown(model, name, "has parameters, and is not called by a block"))
    for name in named:
        child = next((c for c in children if name.startswith(f"{c}.")), "")
        if child and child not in found:
            around = name.rpartition(".")[0]
            if any(f"{n}.".startswith(f"{child}.") and named[n].kind not in CLOSED for n in named):
                found[child] = "unsplit"
            elif "Attention" in type(modules[around]).__name__:
                found[around] = "enter"
    if not children:
        raise ValueError(_unknown(model, "", "has no list of blocks in which the plan names anything"))
    return found | {next(iter(children.values())): "split"}


def _unknown(model: nn.Module, name: str, why: str) -> str:
    what = f"{name!r}, a {type(model.get_submodule(name)).__name__}," if name else "it"
    return (
        f"{type(model).__name__} under sequence parallelism: {what} {why}, so whether it works on all time is not "
        f"known: leave sequence parallelism out, or give your own tensor_plan=..."
    )


def _called(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The children of a module that are called; a list counts as its entries."""
    own = [n for n in modules if n.rpartition(".")[0] == name and n]
    return [c for n in own for c in (_called(modules, n) if isinstance(modules[n], nn.ModuleList) else [n])]


def _counted(model: Any, name: str, word: str) -> str:
    """A style with the number that it has in this module, if there is one."""
    module = model.get_submodule(name)
    if word == "shared":
        return f"shared {model.get_submodule(name.rpartition('.')[0]).qk_rope_head_dim}"
    if word == "local" or len(signature(module.forward).parameters) == 1:
        return word
    config = model.config.get_text_config()
    known = [count for key in ROUTED if isinstance(count := vars(config).get(key), int)]
    if not known:
        raise ValueError(
            f"{type(model).__name__}'s tensor plan has experts in {name!r}, and its config does not say how many each "
            f"token goes to ({', '.join(ROUTED)}): give your own tensor_plan=..."
        )
    return f"{word} {known[0]}"
