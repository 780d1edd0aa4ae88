"""Bytes of a planned rank during a step, by kind, for every rank of the pipe axis.

parameters, gradients, optimizer    at rest, as the row's cells cut them
gathered      whole parameters: the units that are open at once, or those that the row keeps for the backward
reduced       whole gradients of the two largest units, where the row cuts gradients
activations   those of the microbatches in flight
working       of the running operators: tensors gathered over the tensor axis, the gradients of an MLP, a recomputed
              block, masks of a context axis, and tokens that come to experts
logits        the head's and the loss's values of one microbatch, beyond those kept for the backward
received      activations and gradients on their way between stages
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from plait.predict.activations import DecoderSizes, block, decoder, expert_bytes
from plait.predict.chain import Chain
from plait.predict.memory import Held, formula, state_bytes
from plait.predict.plan import Plan, RankLinks
from plait.predict.sent import handed_bytes
from plait.table.cells import DENSE, EXPERTS


@dataclass(frozen=True)
class Footprint:
    """The bytes of one rank of the pipe axis; all its data and tensor ranks have as many."""

    pipe: int
    """The rank's coordinate on the pipe axis."""
    params: float
    grads: float
    optimizer: float
    gathered: float
    reduced: float
    activations: float
    working: float
    logits: float
    received: float

    @property
    def state(self) -> float:
        """The bytes between steps."""
        return self.params + self.grads + self.optimizer

    @property
    def total(self) -> float:
        return sum(self.kinds.values())

    @property
    def kinds(self) -> Mapping[str, float]:
        """The bytes by kind."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "pipe"}


LOSS_BYTES = 8
"""The bytes per logit that are alive at the loss's peak, beyond the kept log-softmax and the logits themselves: the
copy in fp32 that the loss reads, and its gradient."""


def footprints(plan: Plan) -> tuple[Footprint, ...]:
    """The bytes of each rank of the pipe axis."""
    peaks = plan.bubbles(1.0, 2.0).peaks
    assert peaks is not None
    found: dict[tuple[RankLinks, int], Footprint] = {}
    for pipe, key in enumerate(zip(plan.shares, peaks, strict=True)):
        if key not in found:
            found[key] = _footprint(plan, pipe, *key)
    return tuple(replace(found[key], pipe=pipe) for pipe, key in enumerate(zip(plan.shares, peaks, strict=True)))


def fullest(plan: Plan) -> Footprint:
    """The bytes of the rank that needs the most."""
    peaks = plan.bubbles(1.0, 2.0).peaks
    assert peaks is not None
    most: dict[RankLinks, tuple[int, int]] = {}  # among ranks with the same links, the one with the most in flight
    for pipe, (share, peak) in enumerate(zip(plan.shares, peaks, strict=True)):
        if share not in most or peak > most[share][1]:
            most[share] = pipe, peak
    return max((_footprint(plan, most[share][0], share, most[share][1]) for share in most), key=lambda one: one.total)


def _footprint(plan: Plan, pipe: int, share: RankLinks, in_flight: int) -> Footprint:
    row, mesh, model = plan.strategy, plan.mesh, plan.model
    bytes_of = state_bytes(row, plan.dtype, plan.states)
    own, wide = bytes_of["param_bytes"], bytes_of["grad_bytes"]
    # A tied weight is on the first stage and on the last.
    kinds = {DENSE: _units(plan, share), EXPERTS: _expert_units(plan, share)}
    held = Held(0, 0, 0)
    gathered = reduced = 0.0
    for axes, units in kinds.items():
        elements, params = sum(units), mesh.count(axes.of(row.params.split))
        held = held.plus(formula(elements, mesh, row, axes, **bytes_of))
        most = sum(sorted(units)[-2 if axes == DENSE else -1 :])  # experts are opened one layer at a time
        if params > 1:
            kept, opened = mesh.count(axes.of(row.kept.split)), most
            if mesh.pipe > 1 and units:  # the stage that it holds
                opened = elements if plan.stages_per_rank == 1 else max(opened, max(share.stages, default=0) * units[0])
            keeps = elements / kept if kept < params else 0
            gathered += own * (max(opened, keeps) if kept == 1 else keeps + opened)
        if mesh.count(axes.of(row.grads.split)) > 1:
            reduced += wide * most
    per_stage = in_flight / plan.stages_per_rank
    if isinstance(model, Chain):
        alive = per_stage * plan.samples * own * sum(model.links[link].kept for link in share.others)
        working = 2.0 * plan.samples * own * max(model.links[link].handed for link in share.others)
        received = 2.0 * handed_bytes(plan) if mesh.pipe > 1 else 0.0
        return Footprint(
            pipe, held.params, held.grads, held.optimizer, gathered, reduced, alive, working, 0.0, received
        )
    sizes = plan.sizes
    alive = per_stage * kept_in(sizes, share.blocks - share.dense, share.embed, share.norm, plan.recompute)
    alive += per_stage * share.dense * block_bytes(plan.dense_sizes, plan.recompute)
    again = block_bytes(sizes, None) if plan.recompute == "full" and share.blocks else 0
    # The backward of an MLP has the gathered input, its gradient, the output's, and three of the inner width.
    working = (
        again + sizes.masks + 3.0 * sizes.tokens * (model.hidden + -(-model.active_ffn // mesh.tensor)) * sizes.itemsize
    )
    working += expert_bytes(sizes, all_to_all=plan.all_to_all)
    logits = kept_loss = 0.0
    if share.head:
        kept_loss = decoder(sizes, ("head",))
        logits = sizes.tokens * -(-model.vocab // mesh.tensor) * (sizes.itemsize + LOSS_BYTES)
    received = 2.0 * sizes.stream * model.hidden * sizes.itemsize if mesh.pipe > 1 else 0.0
    return Footprint(
        pipe, held.params, held.grads, held.optimizer, gathered, reduced, alive + kept_loss, working, logits, received
    )


def _units(plan: Plan, share: RankLinks) -> list[int]:
    """The elements of each unit of a rank that the data axes cut: its blocks, embedding, norm, head."""
    model, ways = plan.model, plan.mesh.tensor
    if isinstance(model, Chain):
        return [model.links[link].parameters for link in share.others]
    experts = 0 if plan.shares_experts else model.sizes("blocks").experts
    units = [model.sizes("blocks").on(ways) + experts] * (share.blocks - share.dense)
    units += [model.sizes("dense").on(ways)] * share.dense
    units += [model.sizes("embed").on(ways)] * share.embed + [model.sizes("norm").on(ways)] * share.norm
    tied_here = model.tied and not share.embed
    return units + [model.sizes("embed" if tied_here else "head").on(ways)] * share.head


def _expert_units(plan: Plan, share: RankLinks) -> list[int]:
    """The elements of each unit of experts that several ranks share."""
    if not plan.shares_experts:
        return []
    here = -(-plan.model.experts // plan.mesh.count(EXPERTS.cut))
    return [here * plan.decoder.expert_size] * (share.blocks - share.dense)


@lru_cache(maxsize=1 << 16)
def block_bytes(sizes: DecoderSizes, recompute: str | None) -> int:
    """The bytes that one block keeps."""
    return sum(one.bytes for one in block(sizes, recompute))


@lru_cache(maxsize=1 << 16)
def kept_in(sizes: DecoderSizes, blocks: int, embed: bool, norm: bool, recompute: str | None) -> int:
    """The bytes that a microbatch keeps in the blocks, the embedding and the norm of a rank."""
    ends = decoder(sizes, ["embed"] * embed + ["norm"] * norm)
    return ends + blocks * block_bytes(sizes, recompute)
