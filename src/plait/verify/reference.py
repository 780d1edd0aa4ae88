"""The single process that makes the run of a layout: a plain model, plain autograd, a stock optimizer.

It knows nothing of units, flat storage or collectives.  All it takes from the layout is the *order of additions*
(``core.additions``): each global microbatch's gradient is a leaf, and the tree says which two are added first.  With
no cut and one microbatch it is the plain full-batch step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.core.additions import MICROBATCH, fold
from plait.core.mesh import Mesh
from plait.engine.init import materialise
from plait.engine.optim import clip_factor, square_sum
from plait.engine.rng import Draw, Streams
from plait.job import Job

Gradients = dict[str, Tensor]
Piece = tuple[str, int, int]
"""The elements ``start..stop`` of a named parameter, flat."""


@dataclass
class Record:
    """What a run of the reference left behind, step by step."""

    losses: list[float] = field(default_factory=list)
    microbatch_losses: list[list[float]] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def run_reference(
    job: Job,
    mesh: Mesh,
    num_microbatches: int,
    order: Sequence[str],
    steps: int,
    *,
    clip: float | None,
    norm_pieces: Sequence[Sequence[Piece]] | None = None,
    keep_gradients: bool = True,
) -> Record:
    """Train ``steps`` steps in this process, adding gradients in the given order.

    Args:
        mesh: only the sizes of its data axes matter.
        order: the sums, innermost first, as ``core.additions`` derives them from a row.
        clip: the largest global norm, as for the engine.
        norm_pieces: the runs whose squares each rank sums for the norm, by data rank; None: whole parameters.
    """
    model = job.build()
    device = torch.device("cpu")
    materialise(model, job.seed, device)
    streams = Streams(job.seed)
    streams.attach(model)
    parameters = dict(model.named_parameters())
    optimizer = job.optimizer(parameters.values())
    ranks = mesh.data_size
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(ranks)]
    sizes = {"replica": mesh.replica, "shard": mesh.shard, MICROBATCH: num_microbatches}
    record = Record()
    for step in range(steps):
        batches = [job.microbatches(step, d, ranks, num_microbatches) for d in range(ranks)]
        count = sum(job.count_fn(batch) for line in batches for batch in line)
        starts, total = [], 0
        for line in batches:
            for batch in line:
                starts.append(total)
                total += len(next(iter(batch.values())))
        losses = [0.0] * (ranks * num_microbatches)

        def leaf(at: dict[str, int], step: int = step, batches=batches, starts=starts, losses=losses, count=count) -> Gradients:  # type: ignore[no-untyped-def]
            data_rank = at["replica"] * mesh.shard + at["shard"]
            place = data_rank * num_microbatches + at[MICROBATCH]
            batch = batches[data_rank][at[MICROBATCH]]
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[data_rank][name])
            streams.begin(Draw(step, place, starts[place], len(next(iter(batch.values())))))
            model.zero_grad(set_to_none=True)
            loss = job.loss_fn(model, batch)
            loss.backward(torch.full_like(loss, 1 / count))
            losses[place] = loss.item()
            for name, buffer in model.named_buffers():
                buffers[data_rank][name].copy_(buffer)
            return {name: p.grad for name, p in parameters.items() if p.grad is not None}

        gradients = fold(tuple(order), sizes, leaf, add)
        record.microbatch_losses.append(losses)
        record.losses.append(math.fsum(losses) / count)
        if keep_gradients:
            record.gradients.append({name: g.clone() for name, g in gradients.items()})
        record.norms.append(_clip(gradients, clip, norm_pieces))
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        optimizer.step()
    record.parameters = {name: p.detach().clone() for name, p in parameters.items()}
    record.buffers = {name: b for name, b in buffers[0].items()}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        record.state[name] = {key: value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return record


def add(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two gradients, elementwise; a parameter without gradient on one side keeps the other's."""
    return {
        name: left[name] + right[name] if name in left and name in right else left.get(name, right.get(name))  # type: ignore[misc]
        for name in {**left, **right}
    }


def _clip(gradients: Gradients, clip: float | None, pieces: Sequence[Sequence[Piece]] | None) -> float | None:
    """Clip in place; the norm before clipping, summed in fp64 in the order of the pieces and rounded once."""
    if clip is None:
        return None
    if pieces is None:
        total = square_sum(gradients.values())
    else:
        total = 0.0
        for rank in pieces:
            total += square_sum(gradients[n].reshape(-1)[a:b] for n, a, b in rank if n in gradients)
    wide = any(g.dtype == torch.float64 for g in gradients.values())
    norm = torch.tensor(total**0.5, dtype=torch.float64 if wide else torch.float32).item()
    factor = clip_factor(norm, clip)
    if factor < 1:
        for gradient in gradients.values():
            gradient.mul_(factor)
    return norm
