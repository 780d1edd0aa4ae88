"""Makes a model from the config and the tokenizer of a Hugging Face folder.  Another module reads the weights.

    config.json ──► AutoModelForCausalLM.from_config ──► the stock class, parameters on meta
    tokenizer.json ──► text ──► tokens
    *.safetensors        see ``run.formats.huggingface``

Nothing is downloaded, and no code in the folder runs.  Any exception that transformers raises about a folder is
reported as a fault of the folder.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.files.reading import check_readable
from plait.run.models.hf import BUILDING

LARGEST = 1 << 24
"""Largest config.json, in bytes."""


@dataclass(frozen=True)
class Pretrained:
    """A folder with a causal language model.  Raises ValueError if there is no folder, or no config in it."""

    path: str

    def __post_init__(self) -> None:
        folder = Path(self.path)
        if not os.path.isdir(folder):
            raise ValueError(f"model hf:{self.path}: no such folder; give one with config.json and safetensors files")
        if not os.path.isfile(folder / "config.json"):
            raise ValueError(f"model hf:{self.path}: no config.json in it, so no Hugging Face model; check the path")

    @contextmanager
    def _blamed(self, fault: str) -> Iterator[Any]:
        """Yields transformers.  Turns its exceptions into a ValueError that names the folder and the fault."""
        transformers = importlib.import_module("transformers")
        try:
            yield transformers
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(f"model hf:{self.path}: transformers {fault}: {text}") from error

    def config(self) -> Any:
        """The folder's config.  Raises ValueError if unreadable, quantised, or not for a causal language model."""
        with self._blamed("cannot read its config.json") as transformers:
            check_readable(Path(self.path) / "config.json", "the config", LARGEST)
            config = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
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
        return int(self.config().vocab_size)

    @property
    def width(self) -> int:
        return int(self.config().hidden_size)

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens in a sample.  None: the model's positions have no end."""
        return getattr(self.config(), "max_position_embeddings", None)

    def outline(self) -> nn.Module:
        """The model of ``build`` with nothing allocated: parameters and buffers are on meta."""
        with torch.device("meta"):
            return self.build()

    def build(self) -> nn.Module:
        """Builds the stock class of the folder's config in fp32, with the values that the class itself sets."""
        config, options = self.config(), {"dtype": torch.float32, "attn_implementation": "sdpa"}
        with BUILDING, self._blamed("cannot build a model from its config.json") as transformers:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
        return model

    @property
    def from_scratch(self) -> bool:
        """True if the folder has no weights of any kind, so that the model's weights are drawn."""
        return not self._has("*.safetensors*", "*.bin*", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.gguf")

    @property
    def reads_bytes(self) -> bool:
        """True if each byte of a text is a token, because the folder has neither weights nor a tokenizer."""
        return self.from_scratch and not self._has("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")

    def _has(self, *patterns: str) -> bool:
        return any(next(Path(self.path).glob(pattern), None) for pattern in patterns)

    def encoder(self) -> Callable[[bytes], Tensor]:
        """Returns a function from UTF-8 text to the tokenizer's tokens, without special ones: int64 [count].
        ValueError for no tokenizer, or one of another vocabulary; the function raises it for other encodings."""
        options = {"local_files_only": True, "trust_remote_code": False}
        with self._blamed("finds no tokenizer in it") as transformers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.path, **options)
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
            encoded = tokenizer(words, add_special_tokens=False, return_attention_mask=False, verbose=False)
            return torch.tensor(encoded["input_ids"], dtype=torch.int64)

        return encode
