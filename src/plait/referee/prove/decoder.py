"""A run on paper: a decoder given by its sizes alone, its units as the engine lays them out, and its layout.

    links     model.embed_tokens   model.layers.0 ... model.layers.125   model.norm   lm_head
    units     ''                   ''                                    root         ''          one for each link
    tensor    rows of the vocabulary   heads, features                   whole        rows of the vocabulary

The names are those of ``LlamaForCausalLM``, so that a proof and an engine name the same buffers; a test compares
them.  Sizes come from flags or from the ``config.json`` of a Hugging Face folder; neither weights nor torch are needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

from plait.predict.context import check_time
from plait.predict.model import Transformer
from plait.schedule.partition import by_sizes, even
from plait.schedule.pipeline import Pipeline
from plait.table.cells import EXPERTS, ITEMSIZE, Strategy
from plait.table.flat import BUCKET_BYTES, Cut, UnitLayout, buckets, lay
from plait.table.mesh import DATA_AXES, Mesh
from plait.table.parallelism import check_recompute
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import Site

EMBEDDING, LAYERS, HEAD = "model.embed_tokens", "model.layers.", "lm_head"
TIED = f"{EMBEDDING}.weight"
"""Also the head's weight, in a decoder that ties them."""

Named = tuple[str, tuple[int, ...], int]
"""A parameter: its name, its shape, and the dim that the tensor axis cuts (-1: every rank has it whole)."""


@dataclass(frozen=True)
class Decoder(Transformer):
    """The sizes of a decoder and its parameters by name; raises ValueError for one that no proof covers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.biases or self.positions or self.head_norms or self.shared_gate:
            raise ValueError(
                f"{self.family} has parameters other than those of llama, mixtral or deepseek_v3: "
                "describe it by --layers --width ..."
            )

    @classmethod
    def of(cls, sizes: Transformer) -> "Decoder":
        """The decoder of these sizes."""
        return cls(**{field.name: getattr(sizes, field.name) for field in fields(sizes)})

    @property
    def num_tensors(self) -> int:
        return sum(len(self.parameters(link)) + len(self.experts_of(link)) for link in self.links)

    @property
    def links(self) -> tuple[str, ...]:
        """The links of the model; a pipeline may cut between them."""
        return (EMBEDDING, *(f"{LAYERS}{i}" for i in range(self.layers)), "model.norm", HEAD)

    def parameters(self, link: str) -> tuple[Named, ...]:
        """The parameters of one link, in layout order."""
        width, query, key = self.hidden, self.heads * self.head, self.kv_heads * self.head
        if link in (EMBEDDING, HEAD):
            return () if link == HEAD and self.tied else ((f"{link}.weight", (self.vocab, width), 0),)
        if link == "model.norm":
            return ((f"{link}.weight", (width,), -1),)
        rows = self._attention(link, width, query, key)
        inside = {"mlp": self.dense_ffn if self.experts else self.ffn}
        if self.experts_of(link):
            rows.append((f"{link}.mlp.gate.weight", (self.experts, width), -1))
            inside = {"mlp.shared_experts": self.shared_ffn} if self.shared_ffn else {}
        up = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        for name, ffn in inside.items():
            rows += [(f"{link}.{name}.{short}.weight", (ffn, width), 0) for short in up]
            rows.append((f"{link}.{name}.down_proj.weight", (width, ffn), 1))
        rows += [(f"{link}.{norm}.weight", (width,), -1) for norm in ("input_layernorm", "post_attention_layernorm")]
        return tuple(rows)

    def _attention(self, link: str, width: int, query: int, key: int) -> list[Named]:
        rows: list[Named] = []
        if self.latent is not None:
            low, rank, plain, rotary, value = self.latent
            shapes: dict[str, tuple[int, ...]] = {"q_proj": (self.heads * (plain + rotary), width)}
            if low:
                shapes = {"q_a_proj": (low, width), "q_a_layernorm": (low,)}
                shapes["q_b_proj"] = (self.heads * (plain + rotary), low)
            shapes |= {"kv_a_proj_with_mqa": (rank + rotary, width), "kv_a_layernorm": (rank,)}
            shapes |= {"kv_b_proj": (self.heads * (plain + value), rank), "o_proj": (width, self.heads * value)}
            return [(f"{link}.self_attn.{name}.weight", shape, -1) for name, shape in shapes.items()]
        for short, size in (("q", query), ("k", key), ("v", key)):
            rows.append((f"{link}.self_attn.{short}_proj.weight", (size, width), 0))
            rows += [(f"{link}.self_attn.{short}_proj.bias", (size,), 0)] * self.qkv_bias
        return [*rows, (f"{link}.self_attn.o_proj.weight", (width, query), 1)]

    def parameters_in(self, link: str, links: Sequence[str]) -> tuple[Named, ...]:
        """A link's parameters in a stage with these links, which may have a copy of another stage's tied weight."""
        copied = link == HEAD and self.tied and EMBEDDING not in links
        return self.parameters(EMBEDDING if copied else link)

    def ties(self, links: Sequence[str]) -> bool:
        """True if a stage with these links shares the tied weight with another."""
        return self.tied and (EMBEDDING in links) != (HEAD in links)

    def is_dense(self, link: str) -> bool:
        """True for a block without experts."""
        return int(link.rpartition(".")[2]) < self.dense_layers if link.startswith(LAYERS) else True

    def experts_of(self, link: str) -> tuple[Named, ...]:
        """The parameters of a link's experts, which are a separate unit."""
        if not self.experts or self.is_dense(link):
            return ()
        up, down = (self.experts, 2 * self.ffn, self.hidden), (self.experts, self.hidden, self.ffn)
        return (f"{link}.mlp.experts.gate_up_proj", up, -1), (f"{link}.mlp.experts.down_proj", down, -1)

    def cut(self, parameter: Named, ways: int) -> TensorCut | None:
        """The cut of a parameter over the tensor axis; ValueError for heads or rows that it cannot share."""
        name, shape, dim = parameter
        if dim < 0 or ways == 1:
            return None
        if ".self_attn." in name:
            try:
                return TensorCut(shape, dim, ways, (shape[dim],), self.head)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if (ways - 1) * -(-shape[dim] // ways) >= shape[dim]:
            raise ValueError(f"{name}: {shape[dim]} rows leave a rank of tensor={ways} without any; use fewer")
        return TensorCut(shape, dim, ways, (shape[dim],))

    def sites(self, links: Sequence[str], *, sequence: bool = False) -> tuple[Site, ...]:
        """The places where some links send over the tensor axis in a pass, as in transformers' plans.

        Args:
            sequence: the stream is cut in time from the first layer on, and whole in a block's experts.
        """
        found: list[Site] = []
        for link in links:
            if link == EMBEDDING:
                found.append(Site("sum" if sequence else "leave", link, self.hidden))
            elif link == HEAD:
                found += [Site("enter", link, self.hidden), Site("loss", "loss", 0)]
            elif link != "model.norm":
                mlp = f"{link}.mlp" if self.gated else f"{link}.mlp.up_proj"
                inside = [(f"{link}.self_attn", f"{link}.self_attn.o_proj"), (mlp, f"{link}.mlp.down_proj")]
                if self.experts:
                    shared = f"{link}.mlp.shared_experts"
                    inside[1:] = [(shared, f"{shared}.down_proj")] * bool(self.shared_ffn)
                found += [Site("split", link, self.hidden)] * (sequence and link == "model.layers.0")
                for enters, leaves in inside:
                    found += [Site("enter", enters, self.hidden), Site("leave", leaves, self.hidden)]
                if self.experts and sequence:
                    found += [Site(kind, f"{link}.mlp", self.hidden) for kind in ("unsplit", "split")]
        return tuple(found)

    def gathered(self, links: Sequence[str], ways: int) -> dict[str, tuple[int, int]]:
        """Elements of a time step in the keys and the values that each attention gathers over a context axis."""
        width = self.kv_heads * self.head // ways
        return {f"{link}.self_attn": (width, width) for link in links if link.startswith(LAYERS)}


def lay_stage(run: "PaperRun", links: Sequence[str], tensor: int) -> tuple[UnitLayout, ...]:
    """The units of a stage with these links on one tensor rank, in the engine's order: the root, then by link."""
    decoder, mesh, cut, params = run.decoder, run.mesh, run.cut, run.strategy.params
    itemsize = params.itemsize(ITEMSIZE[run.dtype])
    loads = [0] * mesh.count(DATA_AXES)
    names, units = sorted(links, key=lambda link: link != "model.norm"), []
    names = [link for link in names if decoder.parameters_in(link, links)]
    of_links = [decoder.parameters_in(link, links) for link in names]
    sizes_of = [[(math.prod(shape), ITEMSIZE[run.dtype]) for _, shape, _ in parameters] for parameters in of_links]
    gathers, shared = mesh.count(params.split) > 1, decoder.ties(links)
    for numbers in buckets(sizes_of, 0 if gathers else run.bucket):
        groups: dict[tuple[bool, bool], list[Named]] = {}
        for parameter in (one for number in numbers for one in of_links[number]):
            kind = run.cuts_time and parameter[0].endswith("norm.weight"), shared and parameter[0] == TIED
            groups.setdefault(kind, []).append(parameter)
        flats = []
        for (_, alone), parameters in groups.items():
            before = tuple([0] * len(loads) if alone else loads) if cut == "tensor" else None
            shapes = [tuple((one[0], _local(decoder, one, mesh.tensor, t)) for one in parameters) for t in (tensor, 0)]
            first = _lay(shapes[1], itemsize, len(loads), cut, before)
            own = _lay(shapes[0], itemsize, len(loads), cut, None, like=first)
            if cut == "tensor":
                sizes = [(b - a) * itemsize for a, b in pairwise(first.bounds)]
                loads = [load + size for load, size in zip(loads, sizes, strict=True)]
            flats.append(own)
        ends = ["root" if names[number] == "model.norm" else names[number] for number in (numbers[0], numbers[-1])]
        both = gathers and decoder.tied and not shared and names[numbers[0]] == EMBEDDING
        units.append(
            UnitLayout(
                " .. ".join(dict.fromkeys(ends)), tuple(flats), (True,) * len(flats), (True,) * (1 + both),
                tuple(summed for summed, _ in groups),
            )
        )  # fmt: skip
    pieces = [0] * mesh.count(EXPERTS.of(DATA_AXES))
    for link in names:
        mine = tuple(
            (name, (shape[0] // mesh.count(EXPERTS.cut), *shape[1:])) for name, shape, _ in decoder.experts_of(link)
        )
        if mine:
            flat = _lay(mine, itemsize, len(pieces), cut, tuple(pieces) if cut == "tensor" else None)
            units.append(UnitLayout(f"{link}.mlp.experts", (flat,), (True,), summed=(False,), axes=EXPERTS))
            if cut == "tensor":
                pieces = [load + (b - a) * itemsize for load, (a, b) in zip(pieces, pairwise(flat.bounds), strict=True)]
    return tuple(units)


def _local(decoder: Decoder, parameter: Named, ways: int, tensor: int) -> tuple[int, ...]:
    cut = decoder.cut(parameter, ways)
    return parameter[1] if cut is None else cut.local_shape(tensor)


_lay = lru_cache(maxsize=64)(lay)


@dataclass(frozen=True)
class PaperRun:
    """One run; ``links`` and ``laid`` raise ValueError for settings that do not fit together."""

    decoder: Decoder
    mesh: Mesh
    strategy: Strategy
    pipeline: Pipeline
    microbatches: int = 8
    split: tuple[int, ...] | None = None
    """The number of links of each stage; None: the same number for each."""
    cut: Cut = "element"
    bucket: int = BUCKET_BYTES
    dtype: str = "fp32"
    """The dtype of parameters and activations, unless the row's cells name another."""
    batch: int = 1
    """Samples of a microbatch on one data rank."""
    length: int = 1024
    """Tokens of a sample."""
    recompute: str | None = None
    ring: bool = False
    """Over a context axis, keys and values go round instead of being gathered."""
    sequence: bool = False
    """Activations between the products of a tensor axis are cut in time."""
    all_to_all: bool = False
    """Over an expert axis, tokens go only to the ranks of their experts, the same number to each."""

    @property
    def cuts_time(self) -> bool:
        """True if the ranks of the tensor axis have different time steps of the stream."""
        return self.sequence and self.mesh.tensor > 1

    def links(self) -> tuple[tuple[str, ...], ...]:
        """The links of each stage."""
        check_time(self.mesh, self.length, ring=self.ring)
        check_recompute(self.recompute, ring=self.ring)
        if self.all_to_all and self.mesh.expert == 1:
            raise ValueError(f"all_to_all goes over the expert axis, and mesh '{self.mesh}' has none")
        apart = self.decoder.latent or self.decoder.dense_layers
        if apart and self.mesh.tensor * self.mesh.context > 1:
            raise ValueError(f"mesh '{self.mesh}': a proof of {self.decoder.family} has no tensor or context axis")
        if self.cuts_time and self.decoder.shared_ffn:
            raise ValueError("sequence_parallel with a shared expert: a proof knows only experts without: leave it out")
        ways, experts = self.mesh.count(EXPERTS.cut), self.decoder.experts
        if (why := self.decoder.unshared(self.mesh)) is not None:
            raise ValueError(why)
        if experts and (self.mesh.expert == 1 or experts % ways):
            raise ValueError(
                f"mesh '{self.mesh}', {experts} experts: a proof has experts on an expert axis, as many on each of its "
                f"{ways} ranks; give expert=n, or see `plait verify`"
            )
        names, count = self.decoder.links, self.pipeline.num_stages
        if self.split is not None and len(self.split) != count:
            raise ValueError(f"a split for {len(self.split)} stages, but the pipeline has {count}: give as many sizes")
        ranges = even(len(names), count) if self.split is None else by_sizes(self.split, len(names))
        return tuple(tuple(names[i] for i in links) for links in ranges)

    def laid(self) -> dict[tuple[int, int], tuple[UnitLayout, ...]]:
        """The units of every stage on every tensor rank."""
        return {
            (s, t): lay_stage(self, links, t) for s, links in enumerate(self.links()) for t in range(self.mesh.tensor)
        }
