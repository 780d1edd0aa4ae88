"""Hugging Face decoders over a context axis: attention goes through the axis, and positions are counted.

model = AutoModelForCausalLM.from_config(config)
engine = Engine(use_context_axis(model), comm, ...)      # on a mesh with context=n
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

NAME = "plait_context"
"""The attention's name in transformers."""
LIMITS = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
"""Options of attention that a context axis does not support."""


def use_context_axis(model: nn.Module) -> nn.Module:
    """Lets a Hugging Face decoder work on steps of time, each rank on its own; returns the model.

    Its layers must attend causally, to all earlier tokens.  Without a context axis it computes as before.

    Raises:
        ValueError: no known attention layer, or one that is limited by a sliding window, chunks or a cap.
    """
    from transformers import AttentionInterface

    config: Any = model.config
    if "time_axis" in vars(model):
        return model
    attending = [m for m in model.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", False)]
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ["sliding_attention" if _window(text) else "full_attention"])}
    limits = sorted(kinds - {"full_attention"}) + ["capped scores"] * bool(
        getattr(text, "attn_logit_softcapping", None)
    )
    if limits or not attending:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(limits) or 'no causal attention that transformers swaps'}: a "
            f"context axis needs layers of full, causal attention that go through transformers' attention interface"
        )
    AttentionInterface.register(NAME, attend)
    for module in (model, *attending):
        vars(module)["time_axis"] = None
    for module in attending:
        projections: list[Any] = [one for name, one in module.named_children() if name in ("k_proj", "v_proj")]
        if len(projections) == 2:  # messages of other modules are not predicted
            vars(module)["gathered_widths"] = tuple(one.out_features for one in projections)
    configs: dict[int, Any] = {id(one.config): one.config for one in (model, *attending)}
    before = {key: one._attn_implementation for key, one in configs.items()}

    def count_positions(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Chooses the attention; under an axis also gives positions, and refuses arguments that shift or mask."""
        axis = model.time_axis
        for key, one in configs.items():
            one._attn_implementation = before[key] if axis is None else NAME
        if axis is None:
            return None
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        for name in ("labels", "attention_mask", "position_ids", "past_key_values", "cache_position"):
            if given.get(name) is not None:
                raise ValueError(
                    f"{type(model).__name__} gets {name!r} under context={axis.ways}, where a rank has a part of the "
                    f"time: positions are counted here, the loss comes from logits and shifted targets, padding is "
                    f"left out by targets of -100, and packed rows or caches are not supported; to generate, use "
                    f"whole_time(model) of plait.tensor.time_axis inside engine.gathered()"
                )
        tokens: Any = given.get("input_ids", given.get("inputs_embeds"))
        return args, {**kwargs, "position_ids": axis.places(tokens.shape[1])[None]}

    model.register_forward_pre_hook(count_positions, with_kwargs=True)
    return model


def _window(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls: [batch, heads, time, width] to [batch, time, heads, width]."""
    axis = getattr(module, "time_axis", None)
    limited = [name for name in LIMITS if options.get(name) is not None]
    if axis is None or limited or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} attends {'with ' + ', '.join(limited) if limited else 'with a mask'} under a "
            f"context axis, or has none: give a model without an engine another config (copy.deepcopy)"
        )
    grouped = query.shape[1] != key.shape[1]
    mixed = axis.attention(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    return mixed.transpose(1, 2).contiguous(), None
