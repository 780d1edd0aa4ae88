"""The one-token probe: changes one token, runs the forward again, and lists the positions whose outputs move.

    token changed      sample 0, step 3         documents   0 0 | 1 1 1 1
    may move           . . . ███ ███ ███        its own step and later ones in its document and its sample
    leaks              earlier steps, other documents, other samples

It tests the layout itself, in eval mode: its attention masks, its cuts of time, each rank's rows.  A model whose tokens
see later ones, such as an encoder, leaks by nature.

A token that goes to another expert changes the number of rows in a product, and so its rounding for other tokens.  In
a model with experts, only changes larger than rounding count as moves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.texts import gather_texts
from plait.forward.batch import batch_tensors
from plait.run.job.job import Job
from plait.step.engine import Engine
from plait.table.collectives import Note
from plait.table.parallelism import Parallelism
from plait.tensor.expert_axis import experts_of

ProbedPosition = tuple[int, int, int]
"""The microbatch, numbered through all data ranks, the sample in it, and the time step."""


@dataclass(frozen=True)
class ProbedToken:
    """A changed token, and the positions that it moved."""

    token: ProbedPosition
    moved: tuple[ProbedPosition, ...]
    leaks: tuple[tuple[ProbedPosition, str], ...]
    """The positions that must not have moved, each with the reason."""

    @property
    def right(self) -> bool:
        """True if it moves something, and nothing that it must not."""
        return bool(self.moved) and not self.leaks

    def __str__(self) -> str:
        microbatch, sample, step = self.token
        start = f"token {step} of sample {sample} in microbatch {microbatch}"
        if not self.moved:
            return f"{start} moves nothing: the model does not read it"
        own = sorted(at[2] for at in self.moved if at[:2] == self.token[:2])
        steps = f"steps {own[0]} to {own[-1]} of its sample ({len(own)} of them)" if own else "no step of its sample"
        if not self.leaks:
            return f"{start} moves {steps}, and nothing else"
        shown = "; ".join(f"microbatch {m}, sample {s}, step {t}: {why}" for (m, s, t), why in self.leaks[:4])
        return f"{start} moves {steps} and LEAKS to {len(self.leaks)} positions: {shown}"


class _KeepsOutputs:
    """Wraps a model and keeps its outputs."""

    def __init__(self, model: Any, outputs: list[Any]) -> None:
        self._model, self._outputs = model, outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        self._outputs.append(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def outputs_of(engine: Engine, batches: Sequence[Any]) -> list[Tensor]:
    """The model's output [samples, time, ...] for each microbatch of this rank; none without the last stage."""
    kept: list[Any] = []
    loss_fn: Any = engine.loss_fn
    engine.loss_fn = lambda model, batch: loss_fn(_KeepsOutputs(model, kept), batch)
    try:
        engine.evaluate(batches)
    finally:
        engine.loss_fn = loss_fn
    found = []
    for output, batch in zip(kept, batches, strict=False):
        samples, steps = batch["tokens"].shape
        shape = samples, steps // engine.comm.mesh.context
        fitting = [t for t in batch_tensors(output) if t.dim() > 2 and tuple(t.shape[:2]) == shape]
        if not fitting:
            raise ValueError(f"the model has no output of [{shape[0]}, {shape[1]}, ...]: a token cannot be probed")
        found.append(fitting[0].detach().as_subclass(Tensor).clone())
    return found


ROUNDINGS = 16
"""The number of last places, of the largest finite output in the same channel, that rounding may move."""


def moved_positions(engine: Engine, before: Sequence[Tensor], after: Sequence[Tensor]) -> list[ProbedPosition]:
    """This rank's positions whose outputs changed, numbered in the whole sequence and the whole step."""
    axis, comm, experts = engine.placed.time_axis, engine.comm, experts_of(engine.model)
    first = comm.data_rank * len(before)
    moved: list[ProbedPosition] = []
    for m, (a, b) in enumerate(zip(before, after, strict=True)):
        places = torch.arange(a.shape[1]) if axis is None else axis.places(a.shape[1]).cpu()
        largest = a.abs().where(a.isfinite(), 0.0).amax((0, 1))
        least = largest * (ROUNDINGS * torch.finfo(a.dtype).eps if experts else 0.0)
        for sample, step in ((a != b) & ~((a - b).abs() <= least)).flatten(2).any(-1).nonzero().tolist():
            moved.append((first + m, sample, int(places[step])))
    return moved


def leaks_of(
    token: ProbedPosition, moved: Sequence[ProbedPosition], batch: Mapping[str, Tensor]
) -> list[tuple[ProbedPosition, str]]:
    """The moved positions that a causal model would not move, with the reason."""
    found = []
    for at in moved:
        if at[:2] != token[:2]:
            found.append((at, "another sample"))
        elif at[2] < token[2]:
            found.append((at, "an earlier step"))
        elif "documents" in batch and (batch["documents"][at[1], token[2] : at[2] + 1].diff() != 0).any():
            found.append((at, "another document"))
    return found


def probe_tokens(job: Job, comm: Comm, parallelism: Parallelism, num: int) -> list[ProbedToken]:
    """Probes the first, a middle and the last token of a sample of the first of ``num`` microbatches, on every rank.

    Raises:
        ValueError: the batches have no ``tokens`` [samples, time], or the model has no output of that shape.
    """
    batches = job.microbatches(0, comm.data_rank, comm.mesh.data_size, num, str(comm.device))
    if not isinstance(batches[0], Mapping) or "tokens" not in batches[0]:
        raise ValueError("--probe-token changes batch['tokens'] [samples, time], and this job's batches have none")
    engine, _ = job.engine(comm, parallelism)
    before = outputs_of(engine, batches)
    mine = comm.data_rank == 0
    whole = batches[0]
    samples, length = whole["tokens"].shape
    sample = samples // 2
    if "documents" in whole:  # the sample with the most of them
        sample = int((whole["documents"].diff() != 0).sum(1).argmax())
    if (whole["tokens"] == whole["tokens"][0, 0]).all():
        raise ValueError("--probe-token puts another token of the batch in a token's place, and all are the same")
    probed = []
    for step in sorted({0, length // 2, length - 1}):
        tokens = whole["tokens"].clone()
        token = (0, sample, step)
        if mine:
            tokens[token[1:]] = tokens[tokens != tokens[token[1:]]][0]
        after = outputs_of(engine, [{**whole, "tokens": tokens}, *batches[1:]])
        rows = gather_texts(comm, json.dumps(moved_positions(engine, before, after)), Note("setup"))
        moved = sorted({(m, s, t) for row in rows for m, s, t in json.loads(row)})
        probed.append(ProbedToken(token, tuple(moved), tuple(leaks_of(token, moved, whole))))
    return probed


def as_data(probed: Sequence[ProbedToken]) -> dict[str, Any]:
    """The findings as plain data."""
    return {"equal": all(one.right for one in probed), "tokens": [asdict(one) for one in probed]}
