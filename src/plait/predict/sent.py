"""Messages of a planned step: their number, their size, and their time on the links that they cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.predict.chain import Chain
from plait.predict.experts import AXES_OF_EXPERTS, predict_experts
from plait.predict.plan import Plan, RankLinks
from plait.table.cells import DENSE, EXPERTS, Move, StateAxes, moves
from plait.table.collectives import Entry, bus_factor
from plait.table.mesh import AXES, Mesh


@lru_cache(maxsize=1 << 14)
def members_on_host(axes: tuple[str, ...], mesh: Mesh, devices: int) -> int:
    """The ranks of a group over these axes that share a host, if ranks fill one host after the other."""
    room, inside = devices, 1
    if axes == ("context",):
        return math.gcd(mesh.context, devices // math.gcd(mesh.tensor, devices))
    for axis in reversed(AXES if "shard" in axes else AXES_OF_EXPERTS):
        size = mesh.axis(axis)
        here = math.gcd(size, room) if room < size or room % size else size
        inside *= here if axis in axes else 1
        room //= here
        if here < size:
            break
    return inside


def message_seconds(kind: str, size: float, axes: tuple[str, ...], plan: Plan, messages: int = 1) -> float:
    """The seconds of collectives over some axes on whole arrays of ``size`` bytes together."""
    ranks, cluster = plan.mesh.count(axes), plan.cluster
    if ranks == 1 or not size:
        return 0.0
    here = min(members_on_host(axes, plan.mesh, cluster.devices), ranks)
    bandwidth, latency = cluster.inside.bandwidth, cluster.inside.latency * (here - 1)
    if here < ranks:
        # all_to_all: no rank's data is in another's way
        shared = cluster.between.bandwidth / max(1, cluster.devices // (1 if kind == "all_to_all" else here))
        bandwidth = min(bandwidth, shared) if here > 1 else shared
        hosts = ranks // here
        latency += cluster.between.latency * (hosts - 1 if kind != "all_reduce" else 2 * math.log2(hosts))
    factor = 1.0 if kind in ("send", "broadcast") else bus_factor(kind, ranks)
    both_ways = 2 if kind == "all_reduce" else 1
    return size * factor / (bandwidth * cluster.reached.network) + messages * latency * (both_ways if here > 1 else 1)


def gathered_bytes(plan: Plan) -> float:
    """The bytes of a block's keys and values over the whole time."""
    s = plan.sizes
    return 2.0 * s.context * s.tokens * s.kv_heads * s.head / s.ways * s.itemsize


def handed_bytes(plan: Plan) -> float:
    """The bytes of the stream that a rank sends to the next stage: its part, if the stream is cut in time."""
    if isinstance(plan.model, Chain):
        return plan.samples * max(link.handed for link in plan.model.links) * plan.itemsize(plan.strategy.params)
    return plan.sizes.stream * plan.model.hidden * plan.sizes.itemsize


def elements_on(plan: Plan, share: RankLinks, axes: StateAxes = DENSE) -> float:
    """The elements, on a rank of the pipe axis, of parameters whose state is over these axes."""
    model, ways = plan.model, plan.mesh.tensor
    if isinstance(model, Chain):
        return sum(model.links[link].parameters for link in share.others) if axes == DENSE else 0
    mixtures = share.blocks - share.dense
    experts = mixtures * model.expert_size * -(-model.experts // plan.mesh.count(EXPERTS.cut))
    if axes == EXPERTS:
        return experts if plan.shares_experts else 0
    parts = {"blocks": mixtures, "dense": share.dense, "embed": share.embed, "norm": share.norm, "head": share.head}
    tied = model.sizes("embed").on(ways) * (model.tied and share.head and not share.embed)
    here = sum(times * model.sizes(link).on(ways) for link, times in parts.items()) + tied
    return here if plan.shares_experts else here + experts


def expert_messages(plan: Plan, *, twice: bool = False) -> tuple[Entry, ...]:
    """A rank's messages for the experts of one block in a microbatch, with equally many tokens for every expert."""
    if not plan.shares_experts:
        return ()
    s, layers = plan.sizes, {"": (plan.decoder.hidden, plan.decoder.chosen)}
    tokens = s.stream if s.sequence else s.tokens
    return predict_experts(
        layers, plan.mesh, [tokens], s.itemsize, sequence=s.sequence, twice=[""] * twice, all_to_all=plan.all_to_all
    )


moves_of = lru_cache(maxsize=1 << 12)(moves)


@dataclass(frozen=True)
class SentMessages:
    """A rank's messages of one kind in a step."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: float
    """The bytes that the rank sends in all of them."""
    seconds: float


def messages(plan: Plan, share: RankLinks) -> tuple[SentMessages, ...]:
    """The messages of a step of a rank with these links."""
    mesh, row, m = plan.mesh, plan.strategy, plan.microbatches
    stages = plan.stages_per_rank
    gathers, again = m, m  # in the forward and in the backward
    if mesh.pipe > 1:  # a rank holds a stage: one is gathered once; several in turn, at most 1.5 times per microbatch
        gathers, again = (1, 0) if stages == 1 or not row.kept.split else (m, -(-m // 2))
    own, wide = plan.itemsize(row.params), plan.itemsize(row.grads)
    embedding = plan.decoder.sizes("embed").on(mesh.tensor) if plan.model.tied else 0
    tied = embedding if share.embed and share.head else 0  # the head gathers it again
    # If nothing runs during computation, calling a collective takes its time too.
    call = 0.0 if plan.overlap else plan.cluster.reached.calls * plan.cluster.device.launch
    found = []

    def add(phase: str, kind: str, axes: tuple[str, ...], size: float, count: int, times: int) -> None:
        """Adds ``times`` rounds of ``count`` messages of ``size`` bytes together."""
        sent = size * (1.0 if kind == "send" else bus_factor(kind, mesh.count(axes)))
        seconds = message_seconds(kind, size, axes, plan, count) + count * call
        found.append(SentMessages(phase, kind, axes, count * times, sent * times, seconds * times))

    for axes, units in ((DENSE, share.units), (EXPERTS, (share.blocks - share.dense) * plan.shares_experts)):
        path, elements = moves_of(row, mesh, axes), elements_on(plan, share, axes)
        phases: tuple[tuple[str, Sequence[Move], int, int], ...] = (
            ("forward", path.forward, own, gathers),
            ("backward", path.backward, own, again),
            ("microbatch", path.microbatch, wide, m),
            ("step", path.step, wide, 1),
            ("publish", path.publish, own, 1),
        )
        for phase, steps, itemsize, times in phases:
            for step in steps:
                if step.sends(mesh) and times and units:
                    size = elements + (tied if phase in ("forward", "backward") and axes == DENSE else 0)
                    add(phase, step.kind, step.axes, size * itemsize / mesh.count(step.outer), units, times)
    for one in expert_messages(plan, twice=plan.recompute == "full"):
        mixtures, phase = share.blocks - share.dense, one.note.phase.removeprefix("expert ")
        add(phase, one.kind, one.axes, one.bytes * mixtures, mixtures, m)
    if mesh.tensor > 1:
        s = plan.sizes
        whole = s.tokens * s.width * s.itemsize
        passes = (("forward", 2 if plan.recompute == "full" else 1), ("backward", 1))
        kinds = ("all_gather", "reduce_scatter") if s.sequence else ("all_reduce",)
        for phase, runs in passes:
            end = share.embed if phase == "forward" else share.head
            for kind in kinds:
                add(phase, kind, ("tensor",), 2 * whole * share.blocks, 2 * share.blocks, m * runs)
            for kind in (kinds[-1],) * end:
                add(phase, kind, ("tensor",), whole, 1, m)
    if mesh.context > 1:
        gathered, again = gathered_bytes(plan) * share.blocks, 2 if plan.recompute == "full" else 1
        add("forward", "all_gather", ("context",), gathered, 2 * share.blocks, m * again)
        add("backward", "reduce_scatter", ("context",), gathered, 2 * share.blocks, m)
    if mesh.pipe > 1:
        if embedding and share.embed != share.head:
            add("tied", "send", ("pipe",), embedding * wide, 1, 1)
        edges = share.embed + share.head + (0 in share.others) + (len(plan.model.links) - 1 in share.others)
        add("pipe", "send", ("pipe",), handed_bytes(plan), 1, m * (2 * stages - edges))
    return tuple(found)


def row_seconds(plan: Plan, share: RankLinks) -> dict[str, float]:
    """The seconds of a row's own messages on a rank in a step, by phase."""
    took = dict.fromkeys(("forward", "backward", "microbatch", "step", "publish"), 0.0)
    for sent in messages(plan, share):
        if not {"tensor", "context", "expert", "pipe"}.intersection(sent.axes):
            took[sent.phase] += sent.seconds
    return took
