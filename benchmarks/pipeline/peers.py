"""The peers: ``torch.distributed.pipelining``, a schedule each, and one process alone.

    torch-gpipe            ScheduleGPipe                                 one stage per rank
    torch-1f1b             Schedule1F1B
    torch-zb_h1            ScheduleInterleavedZeroBubble
    torch-interleaved      ScheduleInterleaved1F1B                       two, stage s on rank s mod p
    torch-interleaved_zb   ScheduleInterleavedZeroBubble
    torch-looped_bfs       ScheduleLoopedBFS
    torch-zbv              ScheduleZBVZeroBubble                         two, on a V
    torch-dualpipe_v       ScheduleDualPipeV

Each comes with both splits (``torch-1f1b-even``, ``torch-1f1b-balanced``). Stages are made by hand from the model's
links, and a rank trains its own with fused AdamW. The loss of a microbatch is a sum over the number of tokens of the
whole batch, so gradients need no scaling afterwards (``scale_grads=False``), and outputs are not collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.contestants import Build, Contestant, adamw, alone, training_loop
from harness.models import Batch, Workload
from models import NUM_MICROBATCHES, stages
from splits import Placement, SplitName, loop, sizes_of, twice, v
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)


@dataclass(frozen=True)
class Peer:
    """A schedule of torch, and where the stages are."""

    schedule: Callable[..., Any]
    placement: Callable[[int], Placement]
    several: bool = True
    """True: the schedule takes a list of stages; False: one stage."""


SCHEDULES = {
    "gpipe": Peer(ScheduleGPipe, loop, several=False),
    "1f1b": Peer(Schedule1F1B, loop, several=False),
    "zb_h1": Peer(ScheduleInterleavedZeroBubble, loop),
    "interleaved": Peer(ScheduleInterleaved1F1B, twice),
    "interleaved_zb": Peer(ScheduleInterleavedZeroBubble, twice),
    "looped_bfs": Peer(ScheduleLoopedBFS, twice),
    "zbv": Peer(ScheduleZBVZeroBubble, v),
    "dualpipe_v": Peer(ScheduleDualPipeV, v),
}

ALONE: dict[str, Build] = {
    "one-process": lambda workload, ranks: alone(workload),
    "one-process-microbatches": lambda workload, ranks: alone(workload, NUM_MICROBATCHES),
}
"""The whole batch at once, or in the pipeline's microbatches, whose activations stay in the cache."""

SIDE_BY_SIDE = "side-by-side"
"""No pipeline at all: every rank trains the whole model on its share of the microbatches, and no one talks.

This is the most that the ranks of this machine can do at once: no order of passes can be faster.
"""


def peers(splits: Sequence[SplitName], costs: Sequence[float]) -> dict[str, Build]:
    """One process, then every schedule with every split; ``costs`` of the links, which balance."""
    return (
        ALONE
        | {SIDE_BY_SIDE: _side_by_side}
        | {
            f"torch-{name}-{split}": pipeline(peer, split, costs)
            for name, peer in SCHEDULES.items()
            for split in splits
        }
    )


def _side_by_side(workload: Workload, ranks: int) -> Contestant:
    model = workload.build()
    optimizer = adamw(model.parameters(), workload.learning_rate)
    train = training_loop(workload, model, optimizer, NUM_MICROBATCHES // ranks)

    def step(batch: Batch) -> Tensor:
        own = slice(dist.get_rank(), None, ranks)
        return train((batch[0][own], batch[1][own]))

    return Contestant(step, loss_is_global=False, communicates=False)


def pipeline(peer: Peer, split: SplitName, costs: Sequence[float]) -> Build:
    """A schedule of torch's over stages of ``costs`` balanced, or even, sizes."""

    def build(workload: Workload, ranks: int) -> Contestant:
        placement = peer.placement(ranks)
        modules = stages(workload.build(), sizes_of(split, costs, placement))
        mine = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank()]
        parts = [PipelineStage(modules[stage], stage, len(placement), torch.device("cpu")) for stage in mine]

        def loss_share(output: Tensor, target: Tensor) -> Tensor:
            """A microbatch's part of the mean over the batch."""
            return workload.pair_loss_sum(output, target) / (NUM_MICROBATCHES * target.numel())

        schedule = peer.schedule(
            parts if peer.several else parts[0], NUM_MICROBATCHES, loss_fn=loss_share, scale_grads=False
        )
        optimizer = adamw([p for stage in mine for p in modules[stage].parameters()], workload.learning_rate)
        is_first, is_last = 0 in mine, len(placement) - 1 in mine

        def step(batch: Batch) -> Tensor | float:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            schedule.step(
                *batch[:1] * is_first,
                target=batch[1] if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
            )
            optimizer.step()
            return torch.stack(losses).sum().detach() if is_last else 0.0

        return Contestant(step, loss_is_global=True, loss_rank=placement[-1])

    return build
