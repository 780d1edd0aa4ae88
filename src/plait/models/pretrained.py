"""A Hugging Face folder as a model: its config and its tokenizer.  The weights are read elsewhere, piece by piece.

    config.json ──► AutoModelForCausalLM.from_config ──► the stock class, parameters on meta
    tokenizer.json ──► text ──► tokens
    *.safetensors        see ``checkpoint.huggingface``

Nothing is downloaded and no code in the folder is run.  Whatever transformers raises about a folder, and it raises many
kinds of exceptions, is reported as a fault of the folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.hf import BUILDING


def _line(error: Exception) -> str:
    """An exception's text as one line."""
    return " ".join(str(error).split())


@dataclass(frozen=True)
class Pretrained:
    """A folder with a causal language model.

    Raises:
        ValueError: there is no such folder, or no config in it.
    """

    path: str

    def __post_init__(self) -> None:
        folder, found = Path(self.path), f"model hf:{self.path}"
        if not folder.is_dir():
            raise ValueError(f"{found}: no such folder; give one with config.json and safetensors files")
        if not (folder / "config.json").is_file():
            raise ValueError(f"{found}: no config.json in it, so it is not a Hugging Face model; check the path")

    def config(self) -> Any:
        """The folder's config, as transformers reads it.

        Raises:
            ValueError: a config.json that transformers cannot read, that is not of a causal language model, or
                whose weights are quantised.
        """
        transformers: Any = importlib.import_module("transformers")
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise ValueError(
                f"model hf:{self.path}: transformers cannot read its config.json: {_line(error)}"
            ) from error
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"model hf:{self.path} is of type {config.model_type!r}, for which transformers has no causal language "
                f"model: give a decoder, such as llama or qwen2"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"model hf:{self.path}: its weights are quantised; give a folder with plain ones to train")
        return config

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.config().vocab_size)

    @property
    def width(self) -> int:
        """Elements of a hidden vector."""
        return int(self.config().hidden_size)

    @property
    def max_length(self) -> int | None:
        """The most tokens of one sample; None: the model's positions have no end."""
        return getattr(self.config(), "max_position_embeddings", None)

    def build(self) -> nn.Module:
        """The stock class of the folder's config, with whatever values it gives itself, in fp32.

        Raises:
            ValueError: a config that transformers cannot build a model from.
        """
        config = self.config()
        transformers: Any = importlib.import_module("transformers")
        with BUILDING:
            try:
                model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation="sdpa"
                )
            except Exception as error:
                raise ValueError(
                    f"model hf:{self.path}: transformers cannot build a model from its config.json: {_line(error)}"
                ) from error
        return model

    def encoder(self) -> Callable[[bytes], Tensor]:
        """From UTF-8 text to tokens of the folder's tokenizer, without special ones: int64 [count].

        Raises:
            ValueError: no tokenizer, or one of another vocabulary; when it is called, a text that is not UTF-8.
        """
        transformers: Any = importlib.import_module("transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ValueError(f"model hf:{self.path}: transformers finds no tokenizer in it: {_line(error)}") from error
        largest, size = max(tokenizer.get_vocab().values(), default=0), self.vocabulary
        if largest >= size:
            raise ValueError(
                f"model hf:{self.path}: its tokenizer has tokens up to {largest}, but the model's vocabulary ends at "
                f"{size - 1}: the tokenizer is another model's, or the embedding was not enlarged with it"
            )

        def encode(text: bytes) -> Tensor:
            try:
                words = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"the text is not UTF-8, which the tokenizer reads ({error}): convert it") from error
            found = tokenizer(words, add_special_tokens=False, return_attention_mask=False, verbose=False)
            return torch.tensor(found["input_ids"], dtype=torch.int64)

        return encode
