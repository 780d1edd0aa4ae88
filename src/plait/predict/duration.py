"""Seconds of a planned step, by the bound of each part.

    block      products + attention + element-wise traffic + starts of kernels, or the time that the CPU takes to launch
               its kernels if that is longer, + messages on the tensor, context and expert axes
    rank       a forward and a backward of its blocks, the embedding, the head and the loss, for one microbatch
    step       microbatches x slowest rank + waits of the order + messages of the row that computation does not hide
               + update

A product reaches a share of the peak that falls with a short inner dimension and with a last wave of tiles that is not
full.  A message takes its latencies, and its bytes over the slowest link that its group crosses.  Groups that cross
hosts at the same time share a host's network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from plait.predict.activations import DecoderSizes
from plait.predict.chain import Chain
from plait.predict.cluster import Cluster
from plait.predict.plan import Plan, RankLinks
from plait.predict.sent import elements_on, expert_messages, gathered_bytes, handed_bytes, message_seconds, row_seconds
from plait.table.cells import DENSE, EXPERTS
from plait.table.mesh import DATA_AXES
from plait.table.tensor_plan import EXPERT_BACKWARD, EXPERT_FORWARD

TILE = 128
"""Rows and columns of a tile of a product."""
ALIGNED = 8
"""Tensor cores take 16-bit matrices whose sides are multiples of this (NVIDIA, Matrix Multiplication Background)."""
UNALIGNED = 4.0
"""The peak of other matrices is so many times lower: A100 has 78 TFLOP/s in fp16 without tensor cores, 312 with them
(NVIDIA, A100 architecture).  It is also the factor on attention's time with heads of other sizes: two runs of tr11."""
HOST_LINK, HOST_MEMORY = 25e9, 200e9
"""Bytes per second of a device to its host (PCIe 4 x16), and of a host's memory, for an optimizer on the CPU."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass of some links, by part."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tensor: float = 0.0
    launch: float = 0.0
    """The seconds that kernels take to start, or that launching them takes beyond the rest."""
    context: float = 0.0
    """Keys and values, and their gradients, on the context axis."""
    expert: float = 0.0
    """Tokens, the experts' outputs for them, and the gradients of both."""

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        return Pass(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Pass)))


@dataclass(frozen=True)
class Duration:
    """Seconds of a step on its slowest rank, by part; they add up to ``total``."""

    products: float
    attention: float
    traffic: float
    launch: float
    tensor: float
    """Messages on the tensor axis."""
    context: float
    """Messages on the context axis."""
    expert: float
    """Messages of tokens on the expert axis."""
    pipe: float
    """Messages between stages that are not hidden."""
    bubble: float
    data: float
    """Messages of the row that are not hidden."""
    update: float
    fixed: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name))


def product_seconds(rows: float, inner: float, columns: float, cluster: Cluster, dtype: str) -> float:
    """Returns the seconds of a product of [rows, inner] and [inner, columns]."""
    peak, units, reached = cluster.peak(dtype), cluster.device.units, cluster.reached
    if columns % ALIGNED and cluster.kind == "cuda" and dtype in ("bf16", "fp16"):
        return 2 * rows * inner * columns * UNALIGNED / peak
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    waves = math.ceil(tiles / units) * units / tiles
    slower = (1 + reached.depth / inner) * (1 + reached.wave * (waves - 1))
    return 2 * rows * inner * columns * slower / (peak * reached.product)


@lru_cache(maxsize=1 << 14)
def block_passes(s: DecoderSizes, cluster: Cluster, dtype: str, tensor: float) -> tuple[Pass, Pass]:
    """Returns forward and backward of one block; ``tensor`` is the seconds of its messages in each pass."""
    reached = cluster.reached
    t, ffn, head = s.ways, s.hidden / s.ways, s.heads * s.head / s.ways
    keys = s.kv_heads * s.head / t

    def product(inner: float, columns: float) -> float:
        return product_seconds(s.tokens, inner, columns, cluster, dtype)

    attended = s.projections or ((s.width, head + 2 * keys), (head, s.width))
    products = sum(product(inner, columns) for inner, columns in attended)
    up = 2 if s.gated else 1
    products += expert_seconds(s, cluster, dtype) if s.experts else 0.0
    products += product(s.width, ffn * up) + product(ffn, s.width) if ffn else 0.0
    attention = 4 * s.tokens * s.length * head / cluster.attention(dtype) * (UNALIGNED if s.head % ALIGNED else 1.0)
    moved = traffic_of_block(s) * reached.passes / (cluster.device.bandwidth * reached.memory)
    collectives = (4 if s.sequence else 2) * (s.ways > 1)
    passes = []
    for times in (1, 2):
        launches = times * reached.kernels * cluster.device.launch
        busy = times * (products + attention + moved)
        waits = max(reached.starts * launches, launches - busy) + collectives * reached.calls * cluster.device.launch
        passes.append(Pass(times * products, times * attention, times * moved, tensor, waits))
    return passes[0], passes[1]


def expert_seconds(s: DecoderSizes, cluster: Cluster, dtype: str) -> float:
    """The seconds of a rank's expert products: tokens are spread evenly, and each expert reads its weights once."""
    rows, inner, up = s.tokens * s.expert_ranks * s.chosen / s.experts, s.expert_hidden, 2 if s.gated else 1
    each = product_seconds(rows, s.width, inner * up, cluster, dtype)
    each += product_seconds(rows, inner, s.width, cluster, dtype)
    weights = s.width * inner * (up + 1) * s.itemsize / (cluster.device.bandwidth * cluster.reached.memory)
    return -(-s.experts // (s.expert_ranks * s.ways)) * max(each, weights)


def traffic_of_block(s: DecoderSizes) -> float:
    """Returns the bytes that the element-wise operators of a block read and write in a forward."""
    e, stream = s.itemsize, s.stream * s.width
    inner = (3 if s.gated else 2) * (s.tokens * s.hidden / s.ways + s.passing * s.expert_hidden) * e
    heads = 2 * s.tokens * (s.heads + s.kv_heads) * s.head / s.ways * e
    if s.kernels.eager:
        # silu writes its result, which the product reads; a rotation: to fp32, the product, back: 20 and not 4.
        inner += 2 * s.tokens * s.hidden / s.ways * e * s.gated
        heads += s.tokens * (s.heads + s.kv_heads) * s.head / s.ways * (e + 14) * s.gated
    scores = 0.0 if s.kernels.flash else 7 * s.tokens * s.length * s.heads / s.ways * e
    sorted_tokens = 4 * s.chosen * stream * e  # sent to their experts, and back
    return stream_traffic(s) + inner + heads + scores + sorted_tokens


def stream_traffic(s: DecoderSizes) -> float:
    """Returns the bytes of a block's norms, sums and masks: the part that every tensor rank has whole."""
    stream = s.stream * s.width
    # An eager norm: to fp32, its square, its mean, times 1/rms, back, times the weight: 36 bytes of 16-bit elements.
    eager = 2 * stream * (4 * s.itemsize + 24) * s.kernels.eager
    return 10 * stream * s.itemsize + 2 * stream * s.dropout + eager


def tensor_seconds(plan: Plan) -> float:
    """The seconds of a block's messages on the tensor axis in a forward; a backward takes as many."""
    sizes, axes = plan.sizes, ("tensor",)
    whole = sizes.tokens * sizes.width * sizes.itemsize
    if not sizes.sequence:
        return 2 * message_seconds("all_reduce", whole, axes, plan)
    each = message_seconds("all_gather", whole, axes, plan) + message_seconds("reduce_scatter", whole, axes, plan)
    return 2 * each


def context_seconds(plan: Plan, kind: str) -> float:
    """The seconds of a block's keys and values on the context axis in one pass: gathered, or their gradients summed."""
    return message_seconds(kind, gathered_bytes(plan), ("context",), plan, 2)


REPEATED = ("products", "attention", "traffic", "tensor")
"""The parts of a forward for which ``Plan.repeats`` has shares."""


def expert_passes(plan: Plan) -> tuple[float, float]:
    """The seconds of the messages of a block's experts in a forward and in a backward, which nothing hides."""
    took = {EXPERT_FORWARD: 0.0, EXPERT_BACKWARD: 0.0}
    for one in expert_messages(plan):
        took[one.note.phase] += message_seconds(one.kind, one.bytes, one.axes, plan)
    return took[EXPERT_FORWARD], took[EXPERT_BACKWARD]


def rank_passes(plan: Plan, share: RankLinks) -> tuple[Pass, Pass]:
    """Returns forward and backward of one microbatch on a rank of the pipe axis, including recomputation."""
    if isinstance(plan.model, Chain):
        return chain_passes(plan, plan.model, share)
    s, cluster = plan.sizes, plan.cluster
    reached, device = cluster.reached, cluster.device
    tensor, own = tensor_seconds(plan), reached.microbatch * plan.stages_per_rank / 2
    there = back = Pass(launch=own)
    kinds = (s, share.blocks - share.dense, expert_passes(plan)), (plan.dense_sizes, share.dense, (0.0, 0.0))
    for sizes, blocks, expert in kinds:
        if not blocks:
            continue
        forward, backward = block_passes(sizes, cluster, plan.dtype, tensor)
        forward = forward.plus(Pass(context=context_seconds(plan, "all_gather"), expert=expert[0]))
        backward = backward.plus(Pass(context=context_seconds(plan, "reduce_scatter"), expert=expert[1]))
        if plan.recompute == "full":
            backward = backward.plus(forward)
        elif plan.repeats is not None:
            again = [getattr(forward, name) * part for name, part in zip(REPEATED, plan.repeats, strict=True)]
            backward = backward.plus(Pass(*again))
        elif plan.recompute == "selective":
            backward = backward.plus(Pass(attention=forward.attention))
        there, back = there.plus(forward, blocks), back.plus(backward, blocks)
    rate, launch = device.bandwidth * reached.memory, ENDS * reached.kernels * device.launch
    if plan.microbatches > 1 and not s.kernels.fused_sums:  # gradients are added to the sums so far
        own, wide = plan.itemsize(plan.strategy.params), plan.itemsize(plan.strategy.grads)
        for axes in (DENSE, EXPERTS):
            whole = plan.mesh.count(axes.of(plan.strategy.grads.split)) == 1
            back = back.plus(Pass(traffic=elements_on(plan, share, axes) * (own + (1 + whole) * wide) / rate))
    if share.embed:
        moved = 2 * s.stream * s.width * s.itemsize / rate
        there = there.plus(Pass(traffic=moved, tensor=tensor / 2, launch=launch))
        back = back.plus(Pass(traffic=2 * moved, launch=2 * launch))
    if share.head:
        columns = s.vocabulary / s.ways
        product = product_seconds(s.tokens, s.width, columns, cluster, plan.dtype)
        moved = LOSS_PASSES * s.tokens * columns * s.wide / rate
        there = there.plus(Pass(products=product, traffic=moved, launch=launch))
        back = back.plus(Pass(products=2 * product, traffic=moved, tensor=tensor / 2, launch=2 * launch))
    return there, back


def chain_passes(plan: Plan, model: Chain, share: RankLinks) -> tuple[Pass, Pass]:
    """The same for a chain; a backward takes twice the time of its forward."""
    cluster, reached, own = plan.cluster, plan.cluster.reached, [model.links[link] for link in share.others]
    products = plan.samples * sum(link.flops for link in own) / (cluster.peak(plan.dtype) * reached.product)
    moved = plan.samples * sum(link.moved for link in own) * plan.itemsize(plan.strategy.params)
    traffic = moved / (cluster.device.bandwidth * reached.memory)
    launches = sum(link.operators for link in own) * cluster.device.launch
    passes = []
    for times in (1, 2):
        waits = max(reached.starts * launches, launches - products - traffic)
        launch = times * waits + reached.microbatch * plan.stages_per_rank / 2
        passes.append(Pass(products=times * products, traffic=times * traffic, launch=launch))
    return passes[0], passes[1]


LOSS_PASSES = 3.5
"""The number of times that the loss reads or writes the logits in fp32, in each pass: a cast from 16 bits, and the
softmax's result from them; in the backward the gradient from that result, and its cast."""
ENDS = 0.25
"""The kernels of the embedding, and of head and loss, relative to those of a block."""


def duration(plan: Plan) -> Duration:
    """The seconds of a step."""
    mesh, m = plan.mesh, plan.microbatches
    passes = {share: rank_passes(plan, share) for share in set(plan.shares)}
    ranks = [passes[share] for share in plan.shares]
    times = [there.total + back.total for there, back in ranks]
    hop = pipe_seconds(plan)
    slow, path = slowest_path(plan, [(there.total, back.total) for there, back in ranks], hop)
    there, back = ranks[slow]
    stages = plan.stages_per_rank
    pace = share_of_turns(plan.cluster, m * sum(times) / len(times), m * times[slow], path)
    bubble = pace * (path - m * times[slow])
    exposed = 0.0 if plan.overlap else 2 * hop * stages
    all_passes = Pass().plus(there, m * pace).plus(back, m * pace)
    return Duration(
        **vars(all_passes),
        pipe=m * exposed if mesh.pipe > 1 else 0.0,
        bubble=bubble,
        data=max(data_seconds(plan, share, *both) for share, both in passes.items()),
        update=max(update_seconds(plan, share) for share in passes),
        fixed=plan.cluster.reached.fixed,
    )


def slowest_path(plan: Plan, ranks: Sequence[tuple[float, float]], hop: float) -> tuple[int, float]:
    """The rank whose work and waits take longest, with their seconds.

    Under 1F1B and GPipe stages need not be equal: rank r waits until the first microbatch reaches it, and again for the
    stages after it, unless its own passes fill that time (1F1B).  The other orders have formulas for equal ranks, which
    use the mean of all ranks but the slowest.

    Args:
        ranks: seconds of a forward and of a backward of a microbatch on each rank of the pipe axis.
    """
    m, last = plan.microbatches, len(ranks) - 1
    whole = [forward + backward for forward, backward in ranks]
    if plan.order not in ("1f1b", "gpipe"):
        slow = max(range(len(ranks)), key=whole.__getitem__)
        means = [(sum(one) - one[slow] * (last > 0)) / max(last, 1) for one in zip(*ranks, strict=True)]
        waits = plan.bubbles(means[0] / plan.stages_per_rank, means[1] / plan.stages_per_rank).waits
        assert waits is not None
        return slow, m * whole[slow] + max(waits) + 2 * last * hop
    paths, before, after = [], 0.0, sum(whole) + 2 * last * hop
    for rank, (forward, backward) in enumerate(ranks):
        after -= whole[rank] + 2 * hop * (rank > 0)
        filled = min(last - rank, m - 1) if plan.order == "1f1b" else 0
        first, final = max(after - filled * forward, 0.0), max(after - filled * backward, 0.0)
        both = filled < m - 1  # otherwise the last microbatch is on its way during the first wait
        paths.append(before + m * whole[rank] + (min(after, first + final) if both else first))
        before += whole[rank] + 2 * hop
    slow = max(range(len(ranks)), key=paths.__getitem__)
    return slow, paths[slow]


def share_of_turns(cluster: Cluster, mean: float, own: float, path: float) -> float:
    """The share of a path's seconds that it really takes if ranks share cores.

    A rank is up to ``turns`` times as fast while others wait.  Each other rank is assumed to compute with equal chance.

    Args:
        mean: busy seconds of a rank in a step, with all ranks busy.
        own: busy seconds of the path's rank.
        path: seconds of the path with all ranks busy.
    """
    n, turns = cluster.devices, cluster.turns
    if turns <= 1 or n == 1:
        return 1.0
    chance = min(1.0, (n * mean - own) / ((n - 1) * path))
    likely = [math.comb(n - 1, k) * chance**k * (1 - chance) ** (n - 1 - k) for k in range(n)]
    return sum(one * max(1 / turns, (1 + k) / n) for k, one in enumerate(likely))


def pipe_seconds(plan: Plan) -> float:
    """Seconds of one activation between stages."""
    if plan.mesh.pipe == 1:
        return 0.0
    size = handed_bytes(plan)
    ways = plan.mesh.tensor if plan.scatters and not plan.sizes.sequence else 1
    gather = message_seconds("all_gather", size, ("tensor",), plan) if ways > 1 else 0.0
    return message_seconds("send", size / ways, ("pipe",), plan) + gather


def data_seconds(plan: Plan, share: RankLinks, there: Pass, back: Pass) -> float:
    """The seconds of the row's messages on a rank that its computation does not hide."""
    if plan.mesh.count(DATA_AXES) == 1:
        return 0.0
    took = row_seconds(plan, share)
    if not plan.overlap:
        return sum(took.values())
    m, first = plan.microbatches, 1 / max(share.units - share.norm, 1)
    gathered, reduced = took["forward"], took["backward"] + took["microbatch"]
    each = max(gathered - m * there.total, 0) + max(reduced - m * back.total, 0) + first * (gathered + reduced) / m
    return each + max(took["step"] - back.total, first * took["step"]) + took["publish"]


def update_seconds(plan: Plan, share: RankLinks) -> float:
    """The seconds in which the optimizer reads and writes a rank's pieces, on its device or on the host's CPU."""
    row, device = plan.strategy, plan.cluster.device
    owned = sum(elements_on(plan, share, axes) / plan.mesh.count(axes.of(row.optim.split)) for axes in (DENSE, EXPERTS))
    own, wide = plan.itemsize(row.params), plan.itemsize(row.optim)
    moved = plan.itemsize(row.grads) + own + 2 * wide * (plan.states + 1)
    if row.optim.device:
        crossing = owned * (plan.itemsize(row.grads) + own) / HOST_LINK
        return crossing + owned * moved * plan.cluster.devices / HOST_MEMORY
    return owned * moved / (device.bandwidth * plan.cluster.reached.memory)
