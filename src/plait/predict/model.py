"""A decoder by its sizes, for planning: from a Hugging Face ``config.json``, from plait's own flags, or from a count.

link            parameters                                                  tensor axis
embedding       vocab x hidden, learned positions                            cut
block           q, k, v, output, two or three matrices, biases, two norms    cut, but for norms and some biases
norm            one                                                          whole
head            vocab x hidden, if it is not the embedding's                 cut
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from plait.messages.wording import did_you_mean


class LinkSizes(NamedTuple):
    """Elements of the parameters of one link: those that a tensor axis cuts, and those that each rank has whole."""

    cut: int
    whole: int

    def on(self, ways: int) -> int:
        """Elements on one rank of a tensor axis."""
        return -(-self.cut // ways) + self.whole


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder; ValueError where they do not fit together."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    """Elements of a head; 0 is ``hidden / heads``."""
    gated: bool = True
    """Three matrices in the MLP (SwiGLU); otherwise two."""
    qkv_bias: bool = False
    biases: bool = False
    """True if every linear layer has a bias, and norms too (GPT-2's family)."""
    head_norms: bool = False
    """True if queries and keys have their own norms (Qwen 3)."""
    experts: int = 0
    """Experts of each block, of which each token passes ``chosen``; then ``ffn`` is the width inside one.  0: none."""
    chosen: int = 0
    shared_ffn: int = 0
    """The width inside an expert that every token passes, which has a gate."""
    tied: bool = False
    """True if the head's weight is the embedding's."""
    positions: int = 0
    """Rows of a table of learned positions."""
    longest: int = 0
    """The most tokens that a sample may have, by the model's config; 0: no limit is known."""
    family: str = "llama"
    dropout: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from 1")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is no multiple of {self.heads} heads: give a multiple")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly: give a divisor")

        if not 0 <= self.chosen <= self.experts or bool(self.chosen) != bool(self.experts):
            raise ValueError(f"a token passes {self.chosen} of {self.experts} experts: give from 1 to all of them")

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def active_ffn(self) -> int:
        """The width inside the MLP, or inside all experts that a token passes."""
        return self.chosen * self.ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def most_stages(self) -> int:
        return self.layers + 3

    def uncut(self, tensor: int) -> str | None:
        """The reason why a tensor axis cannot cut it; None if it can."""
        if self.kv_heads % tensor or self.ffn % tensor:
            return f"tensor={tensor} does not divide {self.kv_heads} key and value heads and an MLP of {self.ffn}"
        if self.experts and tensor > 1:
            return f"tensor={tensor} over {self.experts} experts, which no tensor axis cuts: leave it out"
        return None

    @property
    def links(self) -> tuple[str, ...]:
        """The links of the model, between which a pipeline may cut."""
        return ("embed", *(f"blocks.{i}" for i in range(self.layers)), "norm", "head")

    def sizes(self, link: str) -> LinkSizes:
        """The elements of one link, ``embed``, ``blocks``, ``norm`` or ``head``."""
        width, query, key = self.hidden, self.heads * self.head, self.kv_heads * self.head
        norm = width * (1 + self.biases)
        if link == "embed":
            return LinkSizes(self.vocab * width, self.positions * width)
        if link == "head":
            return LinkSizes(0 if self.tied else self.vocab * width, 0)
        if link == "norm":
            return LinkSizes(0, norm)
        up = 2 if self.gated else 1
        inner = self.experts * self.ffn + self.shared_ffn if self.experts else self.ffn
        router = width * (self.experts + (self.shared_ffn > 0))
        cut = width * (query + 2 * key) + query * width + (up + 1) * width * inner
        cut += (query + 2 * key) * (self.qkv_bias or self.biases) + up * self.ffn * self.biases
        return LinkSizes(cut, 2 * norm + 2 * width * self.biases + 2 * self.head * self.head_norms + router)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(times * sum(self.sizes(link)) for link, times in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each kind of link with its number."""
        return (("embed", 1), ("blocks", self.layers), ("norm", 1), ("head", 1))

    def flops(self, length: int) -> float:
        """Model FLOPs of a token, forward and backward, as MFU counts them: 6 for each weight of its products and
        12 * layers * heads * head * length for attention, not halved for a causal mask.

        Source: PaLM (Chowdhery et al. 2022), appendix B.
        """
        passed_by = (self.experts - self.chosen) * (3 if self.gated else 2) * self.hidden * self.ffn
        products = self.layers * (self.sizes("blocks").cut - passed_by) + self.vocab * self.hidden
        return 6 * products + 12 * self.layers * self.heads * self.head * length


class FamilyKeys(NamedTuple):
    """The keys of a family's ``config.json``, and what its decoders have."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    ffn: str = "intermediate_size"
    heads: str = "num_attention_heads"
    vocab: str = "vocab_size"
    kv_heads: str = "num_key_value_heads"
    positions: str = ""
    experts: str = ""
    chosen: str = "num_experts_per_tok"
    shared: str = ""
    fixed: Mapping[str, bool] = {}


HF_FAMILIES: dict[str, FamilyKeys] = {
    "llama": FamilyKeys(),
    "mistral": FamilyKeys(),
    "qwen2": FamilyKeys(fixed={"qkv_bias": True}),
    "qwen3": FamilyKeys(fixed={"head_norms": True}),
    "mixtral": FamilyKeys(experts="num_local_experts"),
    "qwen2_moe": FamilyKeys(
        ffn="moe_intermediate_size",
        experts="num_experts",
        shared="shared_expert_intermediate_size",
        fixed={"qkv_bias": True},
    ),
    "qwen3_moe": FamilyKeys(ffn="moe_intermediate_size", experts="num_experts", fixed={"head_norms": True}),
    "gpt2": FamilyKeys(
        "n_layer", "n_embd", "n_inner", "n_head", positions="n_positions", fixed={"gated": False, "biases": True}
    ),
}
"""The families of Hugging Face whose decoders are described here."""


def from_hugging_face(text: str, place: str) -> Transformer:
    """Reads the text of a Hugging Face ``config.json``.

    Args:
        place: the file's name, for errors.

    Raises:
        ValueError: with file, line and field, for a file that is no config of a decoder described here.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}, line {error.lineno}: no JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{place}, line 1: a list or a value, not the object of a config")
    family = found.get("model_type")
    if family not in HF_FAMILIES:
        said = repr(family) if "model_type" in found else "missing"
        hint = did_you_mean(str(family), HF_FAMILIES)
        known = f"{hint}{' ' * bool(hint)}the planner knows {', '.join(HF_FAMILIES)}"
        raise ValueError(f"{where(place, text, 'model_type')}: {said}: {known}; or give --layers --width ...")
    keys = HF_FAMILIES[family]

    def whole(key: str, otherwise: int | None = None) -> int:
        value = found.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or value < 1 or value >= 1 << 40:
            said = "missing" if key not in found else f"{value!r}"
            raise ValueError(f"{where(place, text, key)}: {said}: give a whole number from 1")
        return value

    hidden, heads = whole(keys.hidden), whole(keys.heads)
    described: dict[str, Any] = dict(keys.fixed)
    described["qkv_bias"] = described.get("qkv_bias", False) or bool(found.get("attention_bias", False))
    if keys.experts:
        if found.get("decoder_sparse_step", 1) != 1 or found.get("mlp_only_layers"):
            key = "mlp_only_layers" if found.get("mlp_only_layers") else "decoder_sparse_step"
            raise ValueError(f"{where(place, text, key)}: {found[key]!r}: only models with experts in every block")
        described |= {"experts": whole(keys.experts), "chosen": whole(keys.chosen)}
        described["shared_ffn"] = whole(keys.shared) if keys.shared else 0
    described["tied"] = bool(found.get("tie_word_embeddings", family == "gpt2"))
    try:
        return Transformer(
            layers=whole(keys.layers),
            hidden=hidden,
            ffn=whole(keys.ffn, 4 * hidden if family == "gpt2" else None),
            heads=heads,
            kv_heads=whole(keys.kv_heads, heads),
            vocab=whole(keys.vocab),
            head_dim=whole("head_dim", 0) if found.get("head_dim") else 0,
            positions=whole(keys.positions) if keys.positions else 0,
            longest=whole(keys.positions or "max_position_embeddings", 0),
            family=family,
            **described,
        )
    except ValueError as error:
        if str(error).startswith(place):
            raise
        raise ValueError(f"{where(place, text, keys.heads)}: {error}") from None


def where(place: str, text: str, key: str, table: str = "") -> str:
    """Names the file, the line and the key of a value, in a table of a TOML file; no line where the key is missing."""
    begin = max(text.find(f"[{table}]"), 0) if table else 0
    match = re.compile(rf'^.*?(?<![\w-])"?{re.escape(key)}"?\s*[:=]', re.MULTILINE).search(text, begin)
    line = "" if match is None else f", line {text.count(chr(10), 0, match.end()) + 1}"
    return f"{place}{line}, {key}"
