"""The sizes of a decoder, for planning: from a Hugging Face ``config.json``, from plait's own flags, or from a count.

link            parameters                                                  tensor axis
embedding       vocab x hidden, learned positions                            cut
block           q, k, v, output, two or three matrices, biases, two norms    cut, except for norms and some biases
                its experts                                                  shared by the expert and the tensor axis
dense           a block without experts, like the first ones of some models  cut
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
from plait.table.cells import EXPERTS
from plait.table.mesh import Mesh


class LinkSizes(NamedTuple):
    """The elements of one link's parameters: those that a tensor axis cuts, those that each rank has whole, and those
    of experts, which are shared one by one."""

    cut: int
    whole: int
    experts: int = 0

    def on(self, ways: int) -> int:
        """The elements on one rank of a tensor axis, without the experts."""
        return -(-self.cut // ways) + self.whole


class Latent(NamedTuple):
    """Attention whose queries, keys and values pass through low ranks: the sizes of these, and of a head's parts.

    Source: multi-head latent attention, DeepSeek-V2 (arXiv:2405.04434).
    """

    query: int
    """0 if queries have a single matrix."""
    key_value: int
    plain: int
    rotary: int
    """The elements of a head's query and key that are rotated; all heads share the key's."""
    value: int


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder; raises ValueError if they do not fit together."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    """The elements of a head; 0 is ``hidden / heads``."""
    gated: bool = True
    """True if the MLP has three matrices (SwiGLU); otherwise two."""
    qkv_bias: bool = False
    biases: bool = False
    """True if every linear layer has a bias, and norms too (GPT-2's family)."""
    head_norms: bool = False
    """True if queries and keys have their own norms (Qwen 3)."""
    experts: int = 0
    """The experts of each block; a token passes ``chosen`` of them, and ``ffn`` is the width inside one.  0: none."""
    chosen: int = 0
    shared_ffn: int = 0
    """The width inside an expert that every token passes."""
    shared_gate: bool = False
    """True if that expert's output has a gate (Qwen 2)."""
    dense_layers: int = 0
    """The number of first blocks that have one MLP of ``dense_ffn`` and no experts."""
    dense_ffn: int = 0
    latent: Latent | None = None
    """The attention, if it differs from the usual four matrices."""
    tied: bool = False
    """True if the head's weight is the embedding's."""
    positions: int = 0
    """The rows of a table of learned positions."""
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
        if not 0 <= self.dense_layers <= self.layers * bool(self.experts):
            raise ValueError(f"{self.dense_layers} of {self.layers} layers without experts: give as many at most")

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def active_ffn(self) -> int:
        """The width inside the MLP, or inside all experts that a token passes."""
        return self.chosen * self.ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def expert_size(self) -> int:
        """The elements of one expert's parameters."""
        return (3 if self.gated else 2) * self.hidden * self.ffn if self.experts else 0

    def projections(self, ways: int = 1) -> tuple[tuple[float, float], ...]:
        """The inner width and columns of attention's products on a rank of a tensor axis."""
        width, heads = self.hidden, self.heads / ways
        if self.latent is None:
            query, key = heads * self.head, self.kv_heads * self.head / ways
            return (width, query + 2 * key), (query, width)
        query_rank, rank, plain, rotary, value = self.latent
        query = heads * (plain + rotary)
        queries = ((width, query_rank), (query_rank, query)) if query_rank else ((width, query),)
        return *queries, (width, rank + rotary), (rank, heads * (plain + value)), (heads * value, width)

    @property
    def most_stages(self) -> int:
        return self.layers + 3

    def uncut(self, tensor: int) -> str | None:
        """The reason why a tensor axis cannot cut the model; None if it can."""
        for ffn in (self.shared_ffn, self.dense_ffn) if self.experts else (self.ffn,):
            if self.kv_heads % tensor or ffn % tensor:
                return f"tensor={tensor} does not divide {self.kv_heads} key and value heads and an MLP of {ffn}"
        return None

    def unshared(self, mesh: Mesh) -> str | None:
        """The reason why the ranks of a mesh cannot share the model's experts; None if they can."""
        if not self.experts:
            return f"expert={mesh.expert}: the model has no experts: leave expert out" if mesh.expert > 1 else None
        if mesh.tensor > 1 and mesh.expert == 1:
            return (
                f"tensor={mesh.tensor} over {self.experts} experts without an expert axis is not planned: add expert=n"
            )
        ways = mesh.count(EXPERTS.cut)
        if (ways - 1) * -(-self.experts // ways) >= self.experts:
            return f"{self.experts} experts leave a rank of {ways} (mesh '{mesh}') none: give fewer ranks"
        return None

    @property
    def links(self) -> tuple[str, ...]:
        """The model's links; a pipeline may cut between them."""
        return ("embed", *(f"blocks.{i}" for i in range(self.layers)), "norm", "head")

    def sizes(self, link: str) -> LinkSizes:
        """The elements of one link, ``embed``, ``blocks``, ``dense``, ``norm`` or ``head``."""
        width, query, key = self.hidden, self.heads * self.head, self.kv_heads * self.head
        norm = width * (1 + self.biases)
        if link == "embed":
            return LinkSizes(self.vocab * width, self.positions * width)
        if link == "head":
            return LinkSizes(0 if self.tied else self.vocab * width, 0)
        if link == "norm":
            return LinkSizes(0, norm)
        up, mixture = 2 if self.gated else 1, self.experts > 0 and link == "blocks"
        inner = self.shared_ffn if mixture else self.dense_ffn if link == "dense" else self.ffn
        router = width * (self.experts + self.shared_gate) if mixture else 0
        whole = 2 * norm + 2 * width * self.biases + 2 * self.head * self.head_norms + router
        cut = (up + 1) * width * inner + up * inner * self.biases
        if self.latent is None:
            cut += width * (query + 2 * key) + query * width + (query + 2 * key) * (self.qkv_bias or self.biases)
        else:
            whole += self._low_rank + self.latent.query + self.latent.key_value
            cut += round(sum(a * b for a, b in self.projections())) - self._low_rank
        return LinkSizes(cut, whole, self.experts * self.expert_size if mixture else 0)

    @property
    def _low_rank(self) -> int:
        """The elements of the matrices that lead to a low rank, which a tensor axis does not cut."""
        return self.hidden * (self.latent.query + self.latent.key_value + self.latent.rotary) if self.latent else 0

    @property
    def num_parameters(self) -> int:
        """The elements of all parameters."""
        return sum(times * sum(self.sizes(link)) for link, times in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each kind of link with its number."""
        dense = self.dense_layers
        return (("embed", 1), ("blocks", self.layers - dense), ("dense", dense), ("norm", 1), ("head", 1))

    def flops(self, length: int) -> float:
        """The model FLOPs of a token, forward and backward, as in MFU: 6 for each weight of its products and
        12 * layers * heads * head * length for attention, not halved for a causal mask.

        Source: PaLM (Chowdhery et al. 2022), appendix B.
        """
        blocks = self.sizes("blocks").cut + self.chosen * self.expert_size, self.sizes("dense").cut
        products = (self.layers - self.dense_layers) * blocks[0] + self.dense_layers * blocks[1]
        products += self.layers * self._low_rank + self.vocab * self.hidden
        return 6 * products + 12 * self.layers * self.heads * self.head * length


MOST = 1 << 40
"""The largest size that is planned."""


class FamilyKeys(NamedTuple):
    """The keys of a family's ``config.json``, and its decoders' properties."""

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
    latent: bool = False
    """True for DeepSeek's attention, first layers and number of shared experts."""
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
        fixed={"qkv_bias": True, "shared_gate": True},
    ),
    "deepseek_v3": FamilyKeys(
        ffn="moe_intermediate_size", experts="n_routed_experts", shared="n_shared_experts", latent=True
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
        ValueError: with file, line and field, for a file that is not the config of such a decoder.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{place}{line}: no JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{place}, line 1: a list or a value, not the object of a config")
    family = found.get("model_type")
    if not isinstance(family, str) or family not in HF_FAMILIES:
        said = f"{family!r:.80}" if "model_type" in found else "missing"
        hint = did_you_mean(str(family), HF_FAMILIES)
        known = f"{hint}{' ' * bool(hint)}the planner knows {', '.join(HF_FAMILIES)}"
        raise ValueError(f"{where(place, text, 'model_type')}: {said}: {known}; or give --layers --width ...")
    keys = HF_FAMILIES[family]

    def whole(key: str, otherwise: int | None = None) -> int:
        value = found.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or not 1 <= value <= MOST:
            said = "missing" if key not in found else f"{value!r:.80}"
            raise ValueError(f"{where(place, text, key)}: {said}: give a whole number from 1 to {MOST:,}")
        return value

    def truth(key: str, otherwise: bool = False) -> bool:
        value = found.get(key, otherwise)
        if value not in (True, False, None):
            raise ValueError(f"{where(place, text, key)}: {value!r:.80}: give true or false")
        return bool(value)

    hidden, heads = whole(keys.hidden), whole(keys.heads)
    described: dict[str, Any] = dict(keys.fixed)
    described["qkv_bias"] = described.get("qkv_bias", False) or truth("attention_bias")
    if keys.experts:
        if found.get("decoder_sparse_step", 1) != 1 or found.get("mlp_only_layers"):
            key = "mlp_only_layers" if found.get("mlp_only_layers") else "decoder_sparse_step"
            raise ValueError(f"{where(place, text, key)}: {found[key]!r}: only models with experts in every block")
        described |= {"experts": whole(keys.experts), "chosen": whole(keys.chosen)}
        described["shared_ffn"] = whole(keys.shared) if keys.shared else 0
    if keys.latent:
        described |= {"dense_layers": whole("first_k_dense_replace", 0), "dense_ffn": whole("intermediate_size")}
        described["shared_ffn"] *= whole(keys.ffn)
        ranks = whole("q_lora_rank", 0), whole("kv_lora_rank")
        plain, rotary, value = (whole(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        described["latent"] = Latent(*ranks, plain, rotary, value)
    described["tied"] = truth("tie_word_embeddings", family == "gpt2")
    try:
        return Transformer(
            layers=whole(keys.layers),
            hidden=hidden,
            ffn=whole(keys.ffn, 4 * hidden if family == "gpt2" else None),
            heads=heads,
            kv_heads=whole(keys.kv_heads, heads),
            vocab=whole(keys.vocab),
            head_dim=_head(described.get("latent")) or (whole("head_dim", 0) if found.get("head_dim") else 0),
            positions=whole(keys.positions) if keys.positions else 0,
            longest=whole(keys.positions or "max_position_embeddings", 0),
            family=family,
            **described,
        )
    except ValueError as error:
        if str(error).startswith(place):
            raise
        raise ValueError(f"{where(place, text, keys.heads)}: {error}") from None


def _head(latent: Latent | None) -> int:
    """The mean size of a head's query, key, value and result, by which attention is counted; 0 unless they differ."""
    return 0 if latent is None else (latent.plain + latent.rotary + latent.value) // 2


def where(place: str, text: str, key: str, table: str = "") -> str:
    """Names the file, the line and the key of a value, in a table of a TOML file; no line if the key is missing."""
    begin = max(text.find(f"[{table}]"), 0) if table else 0
    match = re.compile(rf'^.*?(?<![\w-])"?{re.escape(key)}"?\s*[:=]', re.MULTILINE).search(text, begin)
    line = "" if match is None else f", line {text.count(chr(10), 0, match.end()) + 1}"
    return f"{place}{line}, {key}"
