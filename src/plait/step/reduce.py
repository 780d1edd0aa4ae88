"""Everything between a step's last backward and its update: all ranks agree on the step's numbers.

    sums ──► divided by the loss scale ──► norm, losses, who has a gradient ──► clipped ──► the optimizer's
             (in own loops the count, too)  one small all_gather

A step whose numbers are not finite raises on all ranks, or is skipped: the optimizer gets no gradient, so neither
parameters nor its state change.  With a loss scale such a step is always skipped, since there it is expected.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.comm.texts import differences
from plait.step.exchange import Report
from plait.step.nonfinite import NonFinite, described, encoded
from plait.step.norm import block_norms, clip_factor, scale, sum_squares
from plait.step.placed_model import PlacedModel
from plait.step.step import OpenStep, StepResult
from plait.step.watcher import Event
from plait.table.collectives import Note
from plait.table.precision import LossScale
from plait.zero.gradient_watch import GradientWatch
from plait.zero.optim import give_gradients


def position_of(step: int, discarded: int, optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """The position of a rank in the run: steps made, times that gradients were thrown away, the optimizers' options.

    A rank at another position trains another model from then on.
    """
    fields = {"the number of steps made": str(step), "gradients thrown away by zero_grad": str(discarded)}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():  # schedules change these
                if key != "params" and isinstance(value, (int, float, tuple, Tensor)):
                    text = str(float(value)) if isinstance(value, Tensor) else repr(value)
                    fields[f"optimizer {number} group {place} {key}"] = text
    return fields


@torch.no_grad()
def read(device: torch.device, *groups: Sequence[Tensor]) -> list[list[float]]:
    """The values of groups of scalars, by group; waits for the device once."""
    rows = [torch.stack(tuple(group)).view(-1) if group else torch.zeros(0, device=device) for group in groups]
    if device.type == "cpu":
        return [row.tolist() for row in rows]
    values = iter(torch.cat([row.to(device, torch.float64) for row in rows]).tolist())
    return [[next(values) for _ in row] for row in groups]


class Reduce:
    """Computes the sums of a placed model's gradients, the norm, and the gradients that the optimizer gets."""

    def __init__(self, placed: PlacedModel, loss_scale: LossScale | None, nonfinite: NonFinite) -> None:
        if nonfinite not in (known := get_args(NonFinite)):
            raise ValueError(f"nonfinite={nonfinite!r}: it is {' or '.join(map(repr, known))}")
        self.placed, self.nonfinite = placed, nonfinite
        self.loss_scale = None if loss_scale is None else replace(loss_scale)
        self.made = True
        """True if the last step was made, False if it was skipped."""
        self.have_gradient: dict[str, bool] = {}
        """True for each parameter that got a gradient on any rank in the last step."""
        self.watch = GradientWatch()
        if loss_scale is None:
            for stage in placed.stages.values():
                stage.gradients.watch = self.watch

    @property
    def scale(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def reduce(
        self,
        now: OpenStep,
        step: int,
        position: Mapping[str, str],
        clip: float | None,
        tell: Callable[[Event], None],
    ) -> StepResult:
        """Finishes the sums, agrees, clips, and gives the pieces their gradients.

        Args:
            step: its number.
            position: fields that must be the same on all ranks (see ``position_of``).
            clip: the largest norm.
            tell: called with ``"reduced"`` and ``"agreed"`` (see ``watcher``).

        Raises:
            ValueError: ranks at different places of the run.
            FloatingPointError: on all ranks, a loss or gradient that is not finite, if nothing else was asked for.
        """
        placed, exchange, owned, norm = self.placed, self.placed.exchange, self.placed.owned, self.placed.norm
        for stage in placed.stages.values():
            stage.gradients.reduce()
        if placed.ties.edges:
            placed.ties.reduce()
        gradients = [o.gradient for o in owned]  # run by run, so that vector tails fall where a whole tensor's do
        factor = 1 / self.scale
        if now.count is None:
            _, now.count = exchange.counts(len(now.losses), now.local_count, 0, placed.frozen())
            factor /= now.count
        if factor != 1:
            scale(gradients, factor)
        tell("reduced")
        measured = clip is not None or self.loss_scale is not None
        blocks = block_norms(o.gradient for o in owned if norm.counts(o)) if measured else ()
        losses, norms, seen = read(placed.comm.device, now.losses, blocks, self.watch.squares)
        touched = {name for stage in placed.stages.values() for name in stage.gradients.touched()}
        first = self.watch.first(seen)
        place = 0.0 if first is None else float(encoded(first, exchange.names))
        marks = [place, float(placed.comm.stop_signal), float(crc32(repr(position).encode()))]
        report = exchange.report(sum_squares(norms), losses, touched, marks)
        if len({row[2] for row in report.marks}) > 1:
            raise ValueError(
                f"the ranks are not at the same place of the run: "
                f"{'; '.join(differences(placed.comm, position, Note('report')))}. Every rank makes every step, with "
                f"the same options; leave a bad batch out on all of them together"
            )
        total, losses_by_rank, self.have_gradient = report.squares, report.losses, report.have_gradient
        self.made = self._finite(report, step)
        mine = placed.comm.mesh.data_rank(placed.comm.rank) * placed.comm.mesh.context
        local = tuple(map(math.fsum, zip(*losses_by_rank[mine : mine + placed.comm.mesh.context], strict=True)))
        tell("agreed")
        grad_norm = None
        if clip is not None and self.made:
            grad_norm = norm.of(total)
            factor = clip_factor(grad_norm, clip)
            if factor < 1:
                scale(gradients, factor)
        give_gradients(placed.owned, self.have_gradient if self.made else dict.fromkeys(self.have_gradient, False))
        summed = math.fsum(loss for of_rank in losses_by_rank for loss in of_rank)
        stop = next(((rank, int(row[1])) for rank, row in enumerate(report.marks) if row[1]), None)
        return StepResult(step, summed / now.count, now.count, local, grad_norm, self.made, stop)

    def _finite(self, report: Report, step: int) -> bool:
        """True if the step may be made; updates the loss scale, where there is one."""
        if self.loss_scale is not None:
            finite = math.isfinite(report.squares)
            self.loss_scale.update(finite=finite)
            return finite
        exchange = self.placed.exchange
        places, losses = [row[0] for row in report.marks], report.losses
        if not any(places) and math.isfinite(report.squares + sum(map(sum, losses))):
            return True
        problem = described(list(zip(exchange.ranks_with_losses(), losses, strict=True)), places, exchange.names)
        for stage in self.placed.stages.values():
            stage.gradients.wipe()
        if self.nonfinite == "raise":
            raise FloatingPointError(
                f"step {step} (counted from 0) is not finite: {problem or 'the sum of the gradients over the ranks'}; "
                f"no parameter was changed. Look at these samples, lower the learning rate, clip, or leave such steps "
                f'out with nonfinite="skip"'
            )
        return False
