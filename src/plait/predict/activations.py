"""Bytes that a forward keeps for its backward, operator by operator.

    x ─► norm ─► q, k, v ─► rotate ─► attention ─► output ─► dropout ─► + ─► norm ─► gate, up ─► silu·up ─► down ─► ...
         x, 1/rms,  y       tables    q k v,       mixed     mask           (the same)    y     4 of the hidden width
         x/rms                        softmax ...

``block`` lists the values that autograd saves in one block of the project's decoder (``models.gpt``) on the CPU, where
a norm is several operators.  Parameters, buffers and storage that another operator has already saved are not counted.
The count is exact and tested against ``saved_tensors_hooks``; a GPU's fused norm and attention keep less (``Kernels``).

The textbook's count for another layer is table 2 of Korthikanti et al. 2022 (arXiv:2205.05198).  There a column-cut
product keeps its part of the stream and gathers it again in the backward (``MEGATRON``); here it keeps the whole
stream, so sequence parallelism does not divide ``y``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

INDEX_BYTES = 8
"""The bytes of a token, a target, or an index made from them."""


@dataclass(frozen=True)
class Kernels:
    """The facts of an implementation that decide which values autograd keeps."""

    fused_norm: bool = False
    """A norm is one operator, which keeps its input in the input's type."""
    flash: bool = False
    """Attention is one operator, with dropout too, and its output needs no copy."""
    one_byte_masks: bool = False
    """Dropout keeps a byte for each element, rather than a factor of the activations' type."""
    gathers_again: bool = False
    """A column-cut product keeps its part of the stream, and gathers the rest again in the backward."""
    eager: bool = False
    """Element-wise operators run one by one, norms and rotations in fp32 (a Llama without ``torch.compile``)."""
    fused_sums: bool = False
    """The product that makes a weight's gradient adds it to the sum of the microbatches before, at no further cost."""


ON_CPU = Kernels()
FUSED = Kernels(fused_norm=True, flash=True, one_byte_masks=True)
"""The operators of a GPU."""
MEGATRON = Kernels(fused_norm=True, one_byte_masks=True, gathers_again=True, fused_sums=True)
"""The operators that Korthikanti et al. count."""


@dataclass(frozen=True)
class DecoderSizes:
    """A microbatch in a decoder, on one rank of ``ways`` tensor ranks: ``batch`` in samples, ``length`` in tokens,
    ``itemsize`` of the activations in bytes (rotary tables have 4), ``hidden`` the width inside SwiGLU."""

    batch: int
    length: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    itemsize: int = 4
    dropout: bool = True
    ways: int = 1
    sequence: bool = False
    head_dim: int = 0
    """The elements of a head; 0 is ``width / heads``."""
    gated: bool = True
    """Three matrices in the MLP (SwiGLU), or two with an activation between them."""
    experts: int = 0
    """The experts of a block; a token passes ``chosen`` of them; ``hidden`` is the width inside the shared one."""
    chosen: int = 0
    expert_hidden: int = 0
    """The width inside one of the experts."""
    expert_ranks: int = 1
    """The ranks of the expert axis, which all get each other's tokens."""
    projections: tuple[tuple[float, float], ...] = ()
    """The inner width and columns of attention's products on this rank; empty for the usual two."""
    kernels: Kernels = ON_CPU
    context: int = 1
    """The ranks that share these samples, each with a part of their time."""

    @property
    def head(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def wide(self) -> int:
        """The bytes per element of sums: in norms and the loss."""
        return max(4, self.itemsize)

    @property
    def steps(self) -> int:
        """The steps of time on this rank of the context axis."""
        return self.length // self.context

    @property
    def stream(self) -> int:
        """The tokens of the stream between the products; if it is cut in time, those of the rank with the most."""
        return self.batch * (-(-self.steps // self.ways) if self.sequence else self.steps)

    @property
    def tokens(self) -> int:
        """The tokens on this rank of the context axis."""
        return self.batch * self.steps

    @property
    def passing(self) -> int:
        """The rows that pass the experts of this rank, if every expert gets equally many tokens."""
        return (
            -(-self.tokens * self.chosen // self.ways)
            if self.expert_ranks * self.ways > 1
            else self.tokens * self.chosen
        )

    @property
    def latents(self) -> float:
        """The elements of a token in the low ranks of queries, keys and values."""
        return sum(columns for inner, columns in self.projections if inner == self.width)

    @property
    def masks(self) -> int:
        """The bytes of a context axis's causal masks, for the early and the late part of time, one pair for all
        blocks."""
        made = self.context > 1 and not self.dropout
        return made * (self.steps // 2) ** 2 * (2 * self.context + 1) * self.itemsize


@dataclass(frozen=True)
class Kept:
    """The values that one operator keeps: ``numel`` elements of ``itemsize`` bytes."""

    operator: str
    numel: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


def block(s: DecoderSizes, recompute: str | None = None) -> tuple[Kept, ...]:
    """Lists the values that one block keeps: only its input with ``recompute="full"``, all but the core of attention
    with ``"selective"``."""
    e, x = s.itemsize, s.stream * s.width
    if recompute == "full":
        return (Kept("block: x", x, e),)
    hidden = s.tokens * s.hidden // s.ways + s.passing * s.expert_hidden
    heads = s.tokens * s.heads * s.head // s.ways
    y = x if s.kernels.gathers_again else s.tokens * s.width
    mask = [_mask("dropout: factor", x, s)] * s.dropout
    if s.gated:
        kinds = ("silu: gate", "product: silu(gate)", "product: up")
        inside = tuple(Kept(kind, hidden, e) for kind in kinds)
    else:
        inside = (Kept("activation: up", hidden, e),)
    return (
        *_norm(s),
        Kept("query, key, value: y", y, e),
        *[Kept("low ranks, and their norms", round(2 * s.tokens * s.latents), e)] * bool(s.projections),
        *_attention(s, again=recompute == "selective"),
        Kept("output: mixed heads", heads, e),
        *mask,
        *_norm(s),
        *[Kept("router: its weights", s.stream * s.experts, s.wide)] * (s.experts > 0),
        Kept("gate, up: y", (y if s.hidden else 0) + s.passing * s.width, e),
        *inside,
        Kept("down: silu(gate) up", hidden, e),
        *[Kept("sum: results of experts", s.passing * s.width, e)] * (s.experts > 0),
        *mask,
    )


def _mask(operator: str, numel: int, s: DecoderSizes) -> Kept:
    return Kept(operator, numel, 1 if s.kernels.one_byte_masks else s.itemsize)


def _norm(s: DecoderSizes) -> tuple[Kept, ...]:
    x = s.stream * s.width
    if s.kernels.fused_norm:
        return Kept("norm: x", x, s.itemsize), Kept("norm: 1/rms", s.stream, s.wide)
    return Kept("norm: x", x, s.wide), Kept("norm: 1/rms", s.stream, s.wide), Kept("norm: x/rms", x, s.wide)


def _attention(s: DecoderSizes, *, again: bool) -> tuple[Kept, ...]:
    """The values from the projections to the mixed heads; attention is one kernel without dropout, several with it."""
    e, head, fused = s.itemsize, s.head, s.kernels.one_byte_masks
    query = s.tokens * s.heads * head // s.ways
    grouped = s.context * s.tokens * s.kv_heads * head // s.ways
    tables = 0 if fused else s.steps * head * (2 if e != 4 else s.context > 1)
    scores = query * s.length // head
    rotated = Kept("rotate: cos, sin of these steps, or in the dtype of query and key", tables, e)
    inputs = Kept("attention: query", query, e), Kept("attention: key, value", 2 * grouped, e)
    mask = Kept("causal mask", s.steps * s.length, 1)
    rows = Kept("softmax: rows without a key", query // head, 1)
    given = s.context > 1 and s.dropout  # the mask is an argument, not a part of the kernel
    if again:
        return rotated, *inputs, *[mask] * given
    mixed, log_sum = Kept("attention: mixed", query, e), Kept("attention: log sum", query // head, s.wide)
    if s.kernels.flash:
        return *inputs, log_sum, *[mixed] * (s.context > 1), *[mask] * given
    if not s.dropout:
        return rotated, *inputs, mixed, log_sum
    return (
        rotated,
        Kept("scores: query", query, e),
        Kept("scores: key of each head", s.context * query, e),
        *[mask] * (not fused),
        *[rows] * (given and not fused),
        Kept("softmax: its result", scores, e),
        _mask("dropout: factor", scores, s),
        Kept("mix: what is left of the weights", scores, e),
        Kept("mix: value of each head", s.context * query, e),
    )


def embedding(s: DecoderSizes) -> tuple[Kept, ...]:
    """Lists the values that the embedding keeps; over several ranks, also a mask of tokens on other ranks."""
    return (
        Kept("embedding: tokens", s.tokens, INDEX_BYTES),
        *[Kept("embedding: which are elsewhere", s.tokens, 1)] * (s.ways > 1),
        *[_mask("dropout: factor", s.stream * s.width, s)] * s.dropout,
    )


def head(s: DecoderSizes) -> tuple[Kept, ...]:
    """Lists the values that the head and the cross-entropy keep.  If classes are cut, the places of a rank's own
    targets (16 bytes each) depend on the data and are left out."""
    classes = -(-s.vocabulary // s.ways)
    kept = Kept("head: y", s.tokens * s.width, s.itemsize), Kept("loss: log softmax", s.tokens * classes, s.wide)
    if s.ways == 1:
        return (*kept, Kept("loss: targets", s.tokens, INDEX_BYTES), Kept("loss: weight", 1, s.wide))
    return (*kept, Kept("loss: which count", s.tokens, 1), Kept("loss: share of the whole sum", s.tokens, s.wide))


def decoder(s: DecoderSizes, links: Sequence[str], recompute: str | None = None) -> int:
    """The bytes that a microbatch's forward keeps in links: ``embed``, ``blocks.0``, ..., ``norm``, ``head``."""
    parts = {"embed": embedding(s), "blocks": block(s, recompute), "norm": _norm(s), "head": head(s)}
    return sum(kept.bytes for link in links for kept in parts[link.partition(".")[0]])


def expert_bytes(s: DecoderSizes, *, all_to_all: bool = False) -> float:
    """The bytes of other ranks' tokens, of the experts' outputs before they are summed, and of their gradients."""
    if not s.experts or s.expert_ranks == 1:
        return 0.0
    if all_to_all:
        return 4.0 * s.passing * s.width * s.itemsize
    tokens = (s.stream * s.ways if s.sequence else s.tokens) * s.expert_ranks
    return 2.0 * tokens * (1 + s.chosen) * s.width * s.itemsize
