"""Runs the job in plain PyTorch at the witnessed parameters, for the true gradient and its samples.

There are no engine and no ranks: the whole batch of a step enters the model once, the sum of its losses is divided once
by its count, and the job's own optimizer gets the witnessed gradient.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from plait.referee.values import wide
from plait.referee.witness.pieces import Row, piece_of, rows_of
from plait.referee.witness.stored import Witnessed
from plait.run.job.job import Job
from plait.step.step import num_samples, whole_count
from plait.torch_private import tree_map
from plait.zero.state.init import materialise

Gradients = dict[str, Tensor]
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class SampleGradient:
    """The gradient of some samples: that of the sum of their losses, over the count of the whole step."""

    gradients: Gradients
    count: int


class Replay:
    """One process, whose parameters are set to the witnessed values; it begins with ``buffers``, by name."""

    def __init__(self, job: Job, buffers: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self.job, self.model = job, job.build()
        materialise(self.model, job.seed, torch.device("cpu"), job.weights)
        known = dict(self.model.named_buffers())
        self._set_buffers({n: b.clone() for n, b in buffers.items() if n in known and _alike(b, known[n])})
        check_replayable(self.model)
        for module in self.model.modules():
            if isinstance(module, nn.SyncBatchNorm):  # one process has no rank to synchronise with
                module.forward = partial(nn.BatchNorm1d.forward, module)  # type: ignore[method-assign]
        self.parameters = dict(self.model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self._next: dict[str, Tensor] = {}
        """The buffers after the forward of a step's whole batch, for the next step."""
        self.optimizer = job.optimizer(trained)
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Gives parameters their witnessed values."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    def batch(self, step: int) -> Any:
        """The whole batch of a step."""
        return self.job.microbatches(step, 0, 1, 1)[0]

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Restores the buffers after a forward: all forwards of a step start from the step's buffers."""
        before = self._buffers()
        try:
            yield
        finally:
            self._set_buffers(before)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():  # a forward may have replaced them
            if name in values:
                buffer.data = values[name]

    def rows(self, step: int) -> tuple[Row, ...]:
        """The checksums of a step's samples, in order; empty if the model does not see them one by one."""
        found: list[tuple[Row, ...]] = []
        handle = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: found.append(rows_of(args, kwargs)), prepend=True, with_kwargs=True
        )
        try:
            with torch.no_grad(), self._buffers_kept():
                self.job.loss_fn(self.model, batch := self.batch(step))
        finally:
            handle.remove()
        return found[0] if len(found) == 1 and len(found[0]) == num_samples(batch) else ()

    def part(self, step: int, samples: Sequence[int] | None, whole: int) -> SampleGradient:
        """The gradient of some samples of a step (None: all), over a count of ``whole``."""
        batch = self.batch(step)
        if samples is not None:
            num, index = num_samples(batch), torch.tensor(samples)
            batch = tree_map(lambda leaf: leaf[index] if _cut(leaf, num) else leaf, batch)
        count = whole_count(self.job.count_fn(batch))
        self.model.zero_grad()
        with self._buffers_kept():
            loss = self.job.loss_fn(self.model, batch)
            (loss / whole).backward()
            if samples is None:
                self._next = self._buffers()
        gradients = {n: piece_of(p.grad).clone() for n, p in self.parameters.items() if p.grad is not None}
        self.model.zero_grad()
        return SampleGradient(gradients, count)

    def count(self, step: int) -> int:
        """The number of terms in a step's loss."""
        return whole_count(self.job.count_fn(self.batch(step)))

    def update(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters after an update by the job's optimizer; buffers and the learning rate schedule go on."""
        self._set_buffers(self._next)
        self._next = {}
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].to(parameter.dtype, copy=True) if name in gradients else None
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.model.zero_grad()
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def clipped(
    gradients: Mapping[str, Tensor], clip: float | None, of: Collection[str] | None = None
) -> tuple[Gradients, float, float]:
    """Clips gradients (those of some names) to their global norm; returns the norm before, and the factor."""
    gradients = gradients if of is None else {name: g for name, g in gradients.items() if name in of}
    norm = torch.stack([wide(g).norm() for g in gradients.values()]).norm().item() if gradients else 0.0
    factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return {name: g * factor for name, g in gradients.items()}, norm, factor


def check_same_job(witnessed: Witnessed, replay: Replay) -> None:
    """Raises ValueError for a run of another job, by its parameters' names, sizes and dtypes, and for one with gaps."""
    known = replay.parameters
    where = f"{str(witnessed.folder)!r} is of another job"
    there = {name for run in witnessed.runs for name in run.regions}
    if strange := sorted(there ^ known.keys()):
        side = "the job's model has not" if strange[0] in there else "it has not"
        raise ValueError(f"{where}: {side} {strange[0]!r} (they differ in {len(strange)} names)")
    for run in witnessed.runs:
        for name, region in run.regions.items():
            shape, value = replay.shapes[name], run.start[name]
            shape = (math.prod(shape),) if name in run.flat else shape
            if value.dtype != known[name].dtype:
                raise ValueError(
                    f"{where}: {name!r} is {value.dtype}, and the job's is {known[name].dtype}: give --dtype (dtype=)"
                )
            if len(region) != len(shape) or any(
                not 0 <= a <= b <= size for (a, b), size in zip(region, shape, strict=True)
            ):
                raise ValueError(f"{where}: {name!r} has {region} on rank {run.rank}, and the job's shape is {shape}")
    for name, shape in replay.shapes.items():
        filled = known[name].new_zeros(shape, dtype=torch.bool)
        for run in witnessed.runs:
            if name in run.regions:
                run.part(name, filled)[...] = True
        if not filled.all():
            missing = int((~filled).sum())
            raise ValueError(f"{where}: {missing} of the {filled.numel()} elements of {name!r} are on no rank")


def check_replayable(model: nn.Module) -> None:
    """Raises ValueError for a module whose output does not depend on the samples alone."""
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and module.p > 0:
            raise ValueError(
                f"module {name!r} drops with p={module.p:g}, and every engine draws other masks: judge the job without "
                f"dropout (--dropout 0, or nn.Dropout(0.0) in the job)"
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _cut(leaf: Any, num: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == num
