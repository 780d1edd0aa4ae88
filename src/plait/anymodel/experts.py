"""Shares the experts of Hugging Face models over an expert axis: Mixtral, Qwen MoE, DeepSeek and others.

model = AutoModelForCausalLM.from_config(config)
engine = Engine(use_expert_axis(model), comm, ...)      # on a mesh with expert=n
"""

import inspect
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from torch import Tensor, nn

from plait.table.tensor_plan import Style

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
"""The arguments of the module that owns a layer's experts: [tokens, width], then [tokens, chosen] twice."""


def use_expert_axis(model: nn.Module) -> nn.Module:
    """Lets ranks share the experts of a Hugging Face model; returns it.  Without an axis it computes as before.

    Raises:
        ValueError: no module with experts of the known form.
    """
    found = 0
    for module in model.modules():
        if "expert_axis" in vars(module):
            found += 1
        elif (
            hasattr(module, "num_experts")
            and list(inspect.signature(module.forward).parameters) == ARGUMENTS
            and all(p.dim() and len(p) == module.num_experts for p in module.parameters(recurse=False))
        ):
            found += 1
            vars(module)["expert_axis"] = None
            module.forward = MethodType(_forward, module)  # bound to the module, so that a copy has its own
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module with experts as transformers writes them: num_experts, parameters "
            f"[experts, ...] and forward({', '.join(ARGUMENTS)})"
        )
    return model


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    axis = module.expert_axis
    if axis is None:
        return type(module).forward(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    whole = module.num_experts

    def run(rows: Tensor, number: Tensor) -> Tensor:
        """Runs each row as a token with one expert, whose weight is 1."""
        try:
            module.num_experts = len(range(*axis.part(whole)))
            return type(module).forward(module, rows, number[:, None], rows.new_ones(len(rows), 1))  # type: ignore[no-any-return]
        finally:
            module.num_experts = whole

    return axis.experts(run, whole, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def without_experts(model: nn.Module, plan: dict[str, str | Style]) -> dict[str, str | Style]:
    """Returns a tensor plan without the patterns for experts that have an axis: they are shared as a whole."""
    modules, names = dict(model.named_modules()), [n for n, _ in model.named_parameters(remove_duplicate=False)]
    owners = tuple(f"{name}." for name, module in modules.items() if "expert_axis" in vars(module))

    def stays(pattern: str) -> bool:
        hits = [name for name in (*modules, *names) if fnmatchcase(name, pattern)]
        return not hits or not all(f"{name}.".startswith(owners) for name in hits)

    return {pattern: style for pattern, style in plan.items() if stays(pattern)} if owners else plan
