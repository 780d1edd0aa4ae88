"""A run on paper: a model, a cluster, and the layout of the model on the cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from plait.predict.activations import FUSED, ON_CPU, DecoderSizes, Kernels
from plait.predict.chain import Chain
from plait.predict.cluster import Cluster
from plait.predict.context import check_time
from plait.predict.model import Transformer
from plait.schedule.bubbles import Bubbles, bubbles
from plait.schedule.orders import find_order, stages_per_rank
from plait.schedule.partition import by_sizes, even
from plait.schedule.pipeline import Pipeline
from plait.table.cells import EXPERTS, ITEMSIZE, Cell, Strategy
from plait.table.mesh import Mesh


class RankLinks(NamedTuple):
    """The model's links on one rank of the pipe axis, over all its stages."""

    blocks: int
    embed: bool
    norm: bool
    head: bool
    stages: tuple[int, ...]
    """The number of blocks of each of its stages."""
    others: tuple[int, ...] = ()
    """The numbers of its links, if the model is not a decoder."""
    dense: int = 0
    """The blocks without experts, in a model whose other blocks have some."""

    @property
    def units(self) -> int:
        return self.blocks + self.embed + self.norm + self.head + len(self.others)


@dataclass(frozen=True)
class Plan:
    """One layout of one model on one cluster; raises ValueError if they do not fit together."""

    model: Transformer | Chain
    cluster: Cluster
    mesh: Mesh
    strategy: Strategy
    batch: int
    """The samples of a step, over all ranks and microbatches."""
    length: int
    """The tokens of a sample."""
    microbatches: int = 1
    schedule: str | None = None
    """The order of a pipeline; None: 1f1b if there is one."""
    chunks: int | None = None
    split: tuple[int, ...] | None = None
    """The number of links of each stage; None: equally many."""
    recompute: str | None = None
    sequence_parallel: bool = False
    dtype: str = "bf16"
    """The dtype of the computation."""
    states: int = 2
    """The number of values that the optimizer keeps for each element that it updates."""
    kernels: Kernels = FUSED
    scatters: bool = False
    """True if tensor ranks send parts of the stream to the next stage, which gathers them in the host (Megatron)."""
    repeats: tuple[float, float, float, float] | None = None
    """The shares of a forward's products, attention, traffic and tensor messages that a backward repeats, if an engine
    recomputes by operators; bytes are then counted without them."""
    all_to_all: bool = False
    """Over an expert axis, each token goes only to the ranks of its experts; otherwise all tokens are gathered."""
    overlap: bool = True
    """True if gathers and reductions run during computation, as plait's do on a GPU."""

    def __post_init__(self) -> None:
        mesh, model = self.mesh, self.model
        if mesh.size != self.cluster.size:
            devices = f"{self.cluster.hosts} hosts x {self.cluster.devices} devices = {self.cluster.size:,}"
            raise ValueError(f"mesh '{mesh}' has {mesh.size:,} ranks, the cluster {devices}: give as many")
        if isinstance(model, Chain) and mesh.context > 1:
            raise ValueError(f"mesh '{mesh}': a job says nothing of how samples are cut in time: leave context out")
        check_time(mesh, self.length)
        if model.longest and self.length > model.longest:
            raise ValueError(
                f"length {self.length:,} is beyond the {model.longest:,} positions of the model's config: give "
                f"--length {model.longest} or less, or a config with another max_position_embeddings"
            )
        parts = mesh.data_size * self.microbatches
        if self.batch < parts or self.batch % parts:
            ranks = f"{mesh.data_size:,} data ranks x {self.microbatches} microbatches = {parts:,} parts"
            raise ValueError(f"a batch of {self.batch:,} samples over {ranks}: give a multiple of {parts:,}")
        if (why := model.uncut(mesh.tensor) or model.unshared(mesh)) is not None:
            raise ValueError(why)
        if isinstance(model, Chain) and self.recompute is not None:
            raise ValueError("recompute with a job: its operators are counted as they are; leave recompute out")
        if isinstance(model, Chain) and mesh.pipe > model.most_stages:
            raise ValueError(
                f"pipe={mesh.pipe}: the job's model has {model.most_stages} links between which it may be cut"
            )
        _ = self.shares  # raises for more stages than links

    @cached_property
    def samples(self) -> int:
        """The samples of a microbatch on one data rank."""
        return self.batch // (self.mesh.data_size * self.microbatches)

    @property
    def order(self) -> str | None:
        return self.schedule or ("1f1b" if self.mesh.pipe > 1 else None)

    @property
    def stages_per_rank(self) -> int:
        return 1 if self.order is None else stages_per_rank(self.order, self.chunks)

    @cached_property
    def shares(self) -> tuple[RankLinks, ...]:
        """The links of each rank of the pipe axis."""
        links = len(self.model.links)
        found = shares(links, self.order, self.mesh.pipe, self.chunks, self.split)
        if isinstance(self.model, Transformer):
            return tuple(_in_decoder(own, links, self.model.dense_layers) for own in found)
        return tuple(RankLinks(0, False, False, False, (), tuple(k for one in own for k in one)) for own in found)

    def itemsize(self, cell: Cell) -> int:
        """The bytes of an element of some state."""
        return cell.itemsize(ITEMSIZE[self.dtype])

    @property
    def decoder(self) -> Transformer:
        """The model, which must be a decoder."""
        assert isinstance(self.model, Transformer)
        return self.model

    @cached_property
    def sizes(self) -> DecoderSizes:
        """The sizes of a microbatch in the decoder on one rank."""
        return decoder_sizes(
            self.decoder,
            *(self.samples, self.length),
            expert_ranks=self.mesh.expert,
            itemsize=self.itemsize(self.strategy.params),
            ways=self.mesh.tensor,
            sequence=self.sequence_parallel and self.mesh.tensor > 1,
            kernels=self.kernels,
            context=self.mesh.context,
        )

    @cached_property
    def dense_sizes(self) -> DecoderSizes:
        """The same for a block without experts."""
        return replace(self.sizes, hidden=self.decoder.dense_ffn, experts=0, chosen=0)

    @property
    def shares_experts(self) -> bool:
        """True if a layer's experts are a unit, shared by several ranks."""
        return self.model.experts > 0 and self.mesh.count(EXPERTS.cut) > 1

    def bubbles(self, forward: float, backward: float) -> Bubbles:
        """The closed forms of the order for equal ranks, from the times of one stage; a backward's parts are equal."""
        if self.order is None:
            return Bubbles((0.0,), 0.0, (1,))
        pipe, per_rank, half = self.mesh.pipe, self.stages_per_rank, backward / 2
        m, formula = self.microbatches, find_order(self.order).formula
        found = bubbles(formula, pipe * per_rank, m, per_rank, forward, half, half)
        # If an order has no closed form, it is 1F1B's or more.
        waits = [(pipe - 1 - r) * (forward + backward) for r in range(pipe)]
        most = [min(per_rank * m, 2 * (pipe - 1 - r) + (per_rank - 1) * pipe + 1) for r in range(pipe)]
        return Bubbles(found.waits or tuple(waits), found.idle_share, found.peaks or tuple(most))


def decoder_sizes(model: Transformer, batch: int, length: int, *, ways: int = 1, **more: Any) -> DecoderSizes:
    """A microbatch in a decoder; ``more`` are the fields of ``DecoderSizes`` that the model does not decide."""
    return DecoderSizes(
        *(batch, length, model.hidden, model.heads, model.kv_heads),
        hidden=model.shared_ffn if model.experts else model.ffn,
        vocabulary=model.vocab,
        dropout=model.dropout,
        ways=ways,
        head_dim=model.head,
        gated=model.gated,
        experts=model.experts,
        chosen=model.chosen,
        expert_hidden=model.ffn if model.experts else 0,
        projections=model.projections(ways) if model.latent else (),
        **more,
    )


def implementation(model: Transformer | Chain, cluster: Cluster) -> dict[str, Any]:
    """The fields of a plan for the way in which plait's ranks on this cluster compute and send."""
    on_gpu = cluster.kind == "cuda"
    return {"kernels": FUSED if on_gpu else replace(ON_CPU, flash=not model.dropout), "overlap": on_gpu}


@lru_cache(maxsize=4096)
def shares(
    links: int, order: str | None, pipe: int, chunks: int | None, split: tuple[int, ...] | None = None
) -> tuple[tuple[range, ...], ...]:
    """The links of each stage of each rank of the pipe axis: equally many for each stage unless there is a split."""
    pipeline = Pipeline(order, pipe, chunks)
    stages = even(links, pipeline.num_stages) if split is None else by_sizes(split, links)
    owner = pipeline.owner
    return tuple(tuple(own for stage, own in enumerate(stages) if owner[stage] == rank) for rank in range(pipe))


@lru_cache(maxsize=4096)
def _in_decoder(own: tuple[range, ...], links: int, dense_layers: int) -> RankLinks:
    """A rank's links of a decoder: the embedding is first, a norm and the head are last."""
    blocks = tuple(len(range(max(one.start, 1), min(one.stop, links - 2))) for one in own)
    has = [any(link in one for one in own) for link in (0, links - 2, links - 1)]
    dense = sum(len(range(max(one.start, 1), min(one.stop, dense_layers + 1))) for one in own)
    return RankLinks(sum(blocks), has[0], has[1], has[2], blocks, dense=dense)
