"""Tensor plans of models as they come: more styles, and the plans of Hugging Face models.

    plait.Engine(model, comm, tensor_plan=plait.anymodel.plan_of(model))         the plan that a model carries
    plait.Engine(model, comm, tensor_plan=plait.anymodel.ModelPlan({...}))      a plan of the program

A Hugging Face plan knows nothing of sequence parallelism.  Under it the first block cuts the stream in time, attention
enters as a whole (its code shapes the heads by the length of its input), and norms work on the cut stream.  A child of
a block that has anything else in it (a router, a convolution, a product that the plan leaves whole) gets the stream
whole.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn

from plait import tensor
from plait.anymodel.experts import without_experts
from plait.anymodel.tensor.kinds import MORE_KINDS
from plait.table.tensor_plan import Style, match_styles
from plait.tensor import Parallel
from plait.tensor.transformers import WORDS, ends_of, names_in, plan_from_transformers


class ModelPlan(tensor.TensorPlan):
    """A plan that may have styles of ``kinds``."""

    kinds = MORE_KINDS


MORE_WORDS = {
    **WORDS,
    "moe_tp_experts": "experts",
    "all_reduce": "experts",
    "moe_identity_expert": "once",
    "mla_kv_a_proj": "shared",
    "local_params": "local",
}
"""Styles of transformers' plans, in our words; an empty one leaves a module whole, which it may be."""

CLOSED = {"column", "row", "gathered", "divided", "summed", "local"}
"""A module that has only these inside reads a stream that is cut in time, and leaves one."""

ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""How configs call the number of experts of a token."""


def plan_of(model: nn.Module, *, sequence: bool = False) -> ModelPlan:
    """The plan that a model carries, its own or a Hugging Face plan; ValueError where it has none that can be read."""
    carried = getattr(model, "tp_plan", None) if hasattr(model, "get_input_embeddings") else None
    if getattr(model, "tensor_plan", None) is not None or not carried:
        return ModelPlan(tensor.plan_of(model))
    return ModelPlan(without_experts(model, dict(_translated(model, carried, sequence=sequence))))


def resolve_carried(model: nn.Module, ways: int, *, sequence: bool = False) -> Parallel:
    """The plan that a model carries, resolved for an axis of ``ways`` ranks."""
    return tensor.parallel_plan(model, ways, plan_of(model, sequence=sequence), sequence=sequence)


def _translated(model: Any, carried: Mapping[str, str], *, sequence: bool) -> dict[str, str]:
    plan = plan_from_transformers(model, carried, MORE_WORDS)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    parameters, ends = dict(model.named_parameters(remove_duplicate=False)), ends_of(model)
    for pattern in [one for one, word in plan.items() if word in ("experts", "shared", "local")]:
        word = plan.pop(pattern)
        plan |= {name: _counted(model, name, word) for name in names_in(model, pattern, ends)}
    return plan | _in_time(model, modules, match_styles(plan, modules, parameters, MORE_KINDS)) if sequence else plan


def _in_time(model: Any, modules: Mapping[str, nn.Module], named: Mapping[str, Style]) -> dict[str, str]:
    """What sequence parallelism has to know: where the stream is cut in time, and of each child of a block whether it
    works on the cut stream or gets it whole.  Raises ValueError for parameters whose place it cannot tell."""
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
        f"known: leave sequence parallelism out, or give tensor_plan=... of your own"
    )


def _called(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The children of a module that are called: those of a list in its place."""
    own = [n for n in modules if n.rpartition(".")[0] == name and n]
    return [c for n in own for c in (_called(modules, n) if isinstance(modules[n], nn.ModuleList) else [n])]


def _counted(model: Any, name: str, word: str) -> str:
    """A style with the number that goes with it in this module, where there is one."""
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
            f"token goes to ({', '.join(ROUTED)}): give tensor_plan=... of your own"
        )
    return f"{word} {known[0]}"
