"""Hugging Face decoders over a context axis: their attention interface asks the axis, and positions are counted.

model = AutoModelForCausalLM.from_config(config)
engine = Engine(use_context_axis(model), comm, ...)      # on a mesh with context=n
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

NAME = "plait_context"
"""The attention's name in transformers."""


def use_context_axis(model: nn.Module) -> nn.Module:
    """Lets a Hugging Face decoder work on steps of time, each rank on its own; returns the model.

    Its layers must attend causally, to all earlier tokens.  Without a context axis it computes as before.

    Raises:
        ValueError: attention that a sliding window or chunks limit.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        limits = ", ".join(sorted(kinds - {"full_attention"})) or f"a sliding window of {config.sliding_window}"
        raise ValueError(f"{type(model).__name__} limits its attention ({limits}): a context axis has full attention")
    config._attn_implementation = NAME
    attending = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    for module in (model, *attending):
        vars(module)["time_axis"] = None
    model.register_forward_pre_hook(count_positions, with_kwargs=True)
    return model


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, time, width] to [batch, time, heads, width]."""
    grouped = query.shape[1] != key.shape[1]
    if module.time_axis is None:
        mixed = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, attention_mask is None, scale=scaling, enable_gqa=grouped
        )
    else:
        mixed = module.time_axis.attention(
            query, key, value, attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    return mixed.transpose(1, 2).contiguous(), None


def count_positions(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Gives the model the positions of this rank's steps; refuses what would be shifted or masked within them."""
    axis = model.time_axis
    if axis is None:
        return None
    for name in ("labels", "attention_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(model).__name__} gets {name!r} under context={axis.ways}, where a rank has a part of the time: "
                f"compute the loss from the logits and shifted targets, and leave out padding by targets of -100"
            )
    tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    if kwargs.get("position_ids") is None and tokens is not None:
        kwargs = {**kwargs, "position_ids": axis.places(tokens.shape[1])[None]}
    return args, kwargs
