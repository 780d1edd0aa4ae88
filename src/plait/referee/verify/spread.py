"""Decides whether a layout's difference is benign, by the differences of honest runs.

If products are split or numbers have 16 bits, no run has the bits of another, and a constant tolerance is either too
wide for the first layer or too narrow for the last.  So a single process runs again, changed as honest runs may be: it
adds in other orders, and shifts every activation, every activation's gradient and every microbatch's gradient of a
parameter by up to one unit in its last place.  The distance of these runs from the exact one is the spread of that
tensor in that step.  A layout within ``MARGIN`` times the spread is one of them; a bug is tens or thousands of times
outside.

Perturbation as the measure of a tolerance: TTrace (arXiv 2506.09280).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from plait.messages.progress import counted
from plait.referee.values import MARGIN, wide
from plait.referee.verify.compare import BITWISE, Finding, HonestRuns, finding, pairs
from plait.referee.verify.observed import RankRecord
from plait.referee.verify.reference import SingleProcess, run_reference
from plait.run.config.machine import resolve_device
from plait.run.config.settings import RunConfig
from plait.run.job.job import Job
from plait.table.additions import additions
from plait.torch_private import DisableTorchFunction, tree_map

RUNS = 8


@dataclass(frozen=True)
class Spread:
    """A layout among ``runs`` honest runs; ``worst`` is the tensor that is farthest out."""

    runs: int
    worst: Finding
    compared: int

    @property
    def benign(self) -> bool:
        """True if the layout is one of the honest runs."""
        return self.worst.times <= MARGIN

    def __str__(self) -> str:
        w = self.worst
        where = f"the worst of {self.compared} tensors, {w.kind} {w.name}, is {w.times:.2g} times as far off as the"
        if self.benign:
            return f"inside the spread of {self.runs} honest runs: {where} farthest of them: benign"
        return f"outside the spread of {self.runs} honest runs: {where} farthest of them: a bug"


class Jitter:
    """Makes a ``SingleProcess`` another honest run: shifts every value by up to one unit in its last place, drawn from
    ``seed``."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def follow(self, one: SingleProcess) -> None:
        """Perturbs a process from now on."""
        for module in one.model.modules():
            if not module._modules:
                module.register_forward_hook(lambda _, args, out: tree_map(self._activation, out), prepend=True)
        for parameter in one.parameters.values():
            if parameter.requires_grad:
                parameter.register_hook(self.off)

    def _activation(self, value: Any) -> Any:
        numbers = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        if not numbers or value.itemsize == 1:  # nothing is computed in fp8
            return value
        made = value + (self.off(value) - value.detach())  # exact: the two are neighbours
        if made.requires_grad:
            made.register_hook(self.off)
        return made

    def off(self, value: Tensor) -> Tensor:
        """Shifts a tensor by up to a unit in the last place, element by element."""
        with DisableTorchFunction(), torch.no_grad():
            exact = wide(value)
            noise = torch.rand(exact.shape, generator=self.random, dtype=torch.float64) * 2 - 1
            made = exact + exact * noise.to(exact.device) * torch.finfo(value.dtype).eps
            return (torch.view_as_complex(made) if value.is_complex() else made).to(value.dtype)


def honest_runs(
    job: Job,
    config: RunConfig,
    ranks: Sequence[RankRecord],
    runs: int = RUNS,
    enough: Callable[[HonestRuns], bool] = lambda _: False,
) -> HonestRuns:
    """Runs the single process exactly, then repeatedly with additions in other orders and values shifted by a unit in
    the last place.  It takes only the order of additions and the tied weights from the layout, and no number.  The
    runs are not compiled: ``Jitter`` needs to see into the modules.

    Args:
        runs: the largest number of runs.
        enough: returns True if the runs so far suffice.
    """
    job = replace(job, compile=False)
    orders = list(permutations(additions(config.row)))
    device = resolve_device(config.machine)
    run = partial(run_reference, clip=config.task.update.clip, ties=ranks[0].ties, device=device)
    mesh, num, steps = config.machine.parsed_mesh, config.layout.microbatches, config.task.samples.steps
    exact = run(job, mesh, num, additions(config.row), steps)
    honest = HonestRuns(exact, [], torch.finfo(job.dtype).eps)
    for i in counted("honest runs, whose spread tells rounding from a fault", range(runs)):
        made = run(job, mesh, num, orders[i % len(orders)], steps, built=Jitter(i).follow)
        for step in (*exact.steps, *made.steps):
            step.clipped, step.updated = {}, {}  # their spread is not needed
        honest = replace(honest, runs=[*honest.runs, made])
        if enough(honest):
            break
    return honest


def spread_of(ranks: Sequence[RankRecord], honest: HonestRuns) -> Spread:
    """Places a layout among honest runs by its losses, norms, gradients of all steps, and last parameters."""
    found = [
        finding(pair, BITWISE, honest)
        for pair in pairs(ranks, honest.exact)
        if pair.ours is not None and pair.theirs is not None
        if pair.where.phase in ("loss", "norm", "sum", "publish")
        if pair.where.microbatch is None and pair.where.name not in honest.exact.buffers
        if pair.where.phase != "norm" or not (pair.ours + pair.theirs).isnan().any()  # a step was skipped
    ]
    return Spread(len(honest.runs), max(found, key=lambda one: one.times), len(found))
