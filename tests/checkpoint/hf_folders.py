"""Small random decoders as transformers writes them: config, safetensors (one file or several), a byte tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.run.formats.huggingface import open_folder
from plait.run.models import hf
from plait.run.models.pretrained import Pretrained
from plait.step import Engine, empty_parameters

KINDS = ("llama", "qwen2", "gpt2")


def transformers() -> Any:
    import transformers as package

    return package


def config_of(kind: str, *, tie: bool, vocabulary: int = 259, **changes: Any) -> Any:
    """Odd sizes: 3 layers, 6 heads over 2 key/value heads, 259 tokens."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tie, "vocab_size": vocabulary}
    if kind == "gpt2":
        return transformers().GPT2Config(n_layer=3, n_embd=24, n_head=6, n_positions=64, **special | changes)
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 64,
    }
    return getattr(transformers(), {"llama": "LlamaConfig", "qwen2": "Qwen2Config"}[kind])(**sizes | special | changes)


def write(
    folder: Path,
    kind: str = "llama",
    *,
    tie: bool = False,
    files: bool = False,
    dtype: torch.dtype = torch.float32,
    tokens: int = 259,
    **changes: Any,
) -> Path:
    """A folder with distinct values in every weight; ``files``: in several files."""
    config = config_of(kind, tie=tie, **changes)
    torch.manual_seed(3)
    model = transformers().AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB" if files else "5GB")
    write_tokenizer(folder, tokens)
    return folder


def write_tokenizer(folder: Path, tokens: int = 259) -> None:
    """Bytes, and further tokens that no text has up to the given number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {"<|endoftext|>": 256} | {
        f"<{i}>": i for i in range(257, tokens)
    }  # Qwen2's tokenizer wants the first
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def load(folder: Path) -> Any:
    """As transformers reads it."""
    return transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: nn.Module, vocabulary: int = 259) -> Tensor:
    tokens = torch.arange(40).view(2, 20) * 7 % vocabulary
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def engine_of(folder: Path, comm: Any, strategy: str = "zero3", lr: float = 0.1) -> Engine:
    """An engine with the folder's model and weights, and SGD."""
    with empty_parameters():
        model = Pretrained(str(folder)).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    functions: Any = {"loss_fn": hf.loss_sum, "count_fn": hf.token_count}
    return Engine(model, comm, strategy=strategy, optimizer=optimizer, weights=open_folder(folder, model), **functions)
