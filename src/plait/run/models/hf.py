"""Stock Hugging Face decoders with random weights, trained without changing a line of their code.

    tokens_BT -> model.embed_tokens -> model.layers.0 ... -> model.norm -> lm_head -> logits_BTV

``build`` makes one from its sizes alone; nothing is downloaded.  ``transformers`` is an optional extra
(``pip install 'plait[hf]'``) and is imported when the first model is built, not with plait.

The loss is that of ``gpt``: a sum over tokens, with their count.
"""

import importlib
import importlib.util
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from plait.run.models.documents import positions
from plait.run.models.gpt import GPTConfig
from plait.run.models.gpt import token_count as token_count
from plait.tensor import cross_entropy_sum

BUILDING = threading.Lock()
"""Guards builds: while it builds a model, transformers swaps the functions of torch.nn.init in the whole process."""


@dataclass(frozen=True)
class HFConfig(GPTConfig):
    """The sizes of a Hugging Face decoder.  ``dropout`` acts on the attention weights, its only dropout."""

    kind: Literal["llama", "qwen2"] = "llama"
    """qwen2 is llama with biases on query, key and value."""
    tie: bool = False
    """True if the head's weight is the embedding's."""


def check_installed() -> None:
    """Raises ValueError, with the command that installs it, if transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("llama, qwen2 and hf:PATH need transformers, which is not installed: pip install 'plait[hf]'")


def build(config: HFConfig) -> nn.Module:
    """Builds a ``LlamaForCausalLM`` or ``Qwen2ForCausalLM`` of these sizes, with random weights in fp32."""
    check_installed()
    with BUILDING:
        transformers: Any = importlib.import_module("transformers")
        name = {"llama": "Llama", "qwen2": "Qwen2"}[config.kind]
        sizes = getattr(transformers, f"{name}Config")(
            vocab_size=config.vocabulary,
            num_hidden_layers=config.num_layers,
            hidden_size=config.width,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.hidden_width,
            max_position_embeddings=config.max_length,
            attention_dropout=config.dropout,
            tie_word_embeddings=config.tie,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            rms_norm_eps=config.norm_eps,
            bos_token_id=None,
            eos_token_id=None,  # a token is a byte; none is special
            use_cache=False,
            attn_implementation="sdpa",
        )
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(sizes)
    return model


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """``gpt.loss_sum`` for a Hugging Face model, which makes its masks from positions that restart in each document."""
    packed = {"position_ids": positions(batch["documents"])} if "documents" in batch else {}
    logits_BTV: Tensor = model(input_ids=batch["tokens"], use_cache=False, **packed).logits
    return cross_entropy_sum(logits_BTV, batch["targets"])
