"""The work between a step's last backward and its update: all ranks agree on the step's numbers.

    sums ──► divided by the loss scale ──► norm, losses, position in the run, ... ──► clipped ──► the optimizer's
             (in own loops, the count too)  one small all_gather

A step whose numbers are not finite raises on all ranks, or is skipped: the optimizer gets no gradient, so neither
parameters nor its state change.  With a loss scale such a step is always skipped, because it is expected there.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import get_args
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.comm.texts import differences
from plait.step.exchange import Report
from plait.step.late import LateResult, clip_on_device, may_be_late
from plait.step.nonfinite import NonFinite, encoded, not_finite
from plait.step.norm import block_norms, clip_factor, norm_of, scale, sum_squares
from plait.step.placed_model import PlacedModel
from plait.step.step import OpenStep, StepResult
from plait.step.watcher import Event
from plait.table.collectives import Note
from plait.table.precision import LossScale
from plait.zero.gradient_watch import GradientWatch
from plait.zero.optim import give_gradients


def position_of(step: int, discarded: int, optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """The position of a rank in the run: steps made, times that gradients were thrown away, the optimizers' options.

    A rank at another position trains a different model from then on.
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
def joined(device: torch.device, *groups: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Joins groups of scalars into one row in fp64; returns the row and the groups' sizes."""
    rows = [torch.stack(tuple(group)).view(-1).to(device, torch.float64) for group in groups if group]
    return torch.cat(rows), list(map(len, groups))


class Reducer:
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
        self.late: LateResult | None = None
        """The last result that the device decided on."""
        self.watch = GradientWatch()
        if loss_scale is None:
            for stage in placed.stages.values():
                stage.gradients.watch = self.watch

    @property
    def scale(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def settle(self) -> None:
        """Raises the error of a step on a device that was not finite."""
        if self.late is not None:
            self.late.settle()

    def finish(
        self,
        now: OpenStep,
        step: int,
        position: Mapping[str, str],
        clip: float | None,
        tell: Callable[[Event], None],
        *,
        updates: bool,
    ) -> StepResult:
        """Finishes the sums, agrees, clips, and gives the pieces their gradients.

        Args:
            step: the number of the step.
            position: fields that must be the same on all ranks (see ``position_of``).
            clip: the largest norm.
            tell: called with ``"reduced"`` and ``"agreed"`` (see ``watcher``).
            updates: the update follows at once, so that no program sees the result before it.

        Raises:
            ValueError: ranks at different positions in the run.
            FloatingPointError: on all ranks, a loss or gradient that is not finite, unless such steps are skipped.
        """
        placed, exchange, owned, norm = self.placed, self.placed.exchange, self.placed.owned, self.placed.norm
        self.settle()
        for stage in placed.stages.values():
            stage.gradients.finish_sums()
        if placed.ties.edges:
            placed.ties.add_uses()
        gradients = [o.gradient for o in owned]  # run by run, so that vector tails fall as in a whole tensor
        factor = 1 / self.scale
        if now.count is None:
            _, now.count = exchange.counts(len(now.losses), now.local_count, 0, placed.frozen())
            factor /= now.count
        if factor != 1:
            scale(gradients, factor)
        tell("reduced")
        measured = clip is not None or self.loss_scale is not None
        blocks = block_norms(o.gradient for o in owned if norm.counts(o)) if measured else ()
        touched = {name for stage in placed.stages.values() for name in stage.gradients.touched()}
        stop, digest, watch = placed.comm.stop_signal, crc32(repr(position).encode()), copy(self.watch)
        numbers, sizes = joined(placed.comm.device, now.losses, blocks, watch.probes)

        def agree(values: Iterable[float], count: int) -> tuple[Report, StepResult]:
            each = iter(values)
            losses, norms, seen = (list(islice(each, size)) for size in sizes)
            bad = 0 if (first := watch.first(seen)) is None else encoded(first, exchange.names)
            report = exchange.report(sum_squares(norms), losses, touched, [bad, stop, digest])
            if len({row[2] for row in report.marks}) > 1:
                raise ValueError(
                    f"the ranks are not at the same place of the run: "
                    f"{'; '.join(differences(placed.comm, position, Note('report')))}. Every rank makes every step, "
                    f"with the same options; leave a bad batch out on all of them together"
                )
            made, by_rank = self._finite(report, step), report.losses
            mine = placed.comm.data_rank * placed.comm.mesh.context
            local = tuple(map(math.fsum, zip(*by_rank[mine : mine + placed.comm.mesh.context], strict=True)))
            loss = math.fsum(loss for of_rank in by_rank for loss in of_rank)
            stopped = next(((rank, int(row[1])) for rank, row in enumerate(report.marks) if row[1]), None)
            grad_norm = norm_of(report.squares, norm.dtype) if clip is not None and made else None
            return report, StepResult(step, loss / count, count, local, grad_norm, made, stopped)

        if placed.comm.device.type != "cpu" and updates and may_be_late(self):
            self.made, self.have_gradient = True, {name: name in touched for name in exchange.names}
            tell("agreed")
            self.late = LateResult(step, now.count, stop, numbers, agree, placed.optimizers[0])
            if clip is not None:
                clip_on_device(gradients, blocks, clip, norm.dtype)
            give_gradients(owned, self.have_gradient)
            return self.late
        report, result = agree(numbers.tolist(), now.count)
        self.made, self.have_gradient = result.made, report.have_gradient
        tell("agreed")
        if clip is not None and result.grad_norm is not None and (factor := clip_factor(result.grad_norm, clip)) < 1:
            scale(gradients, factor)
        give_gradients(owned, self.have_gradient if self.made else dict.fromkeys(self.have_gradient, False))
        return result

    def _finite(self, report: Report, step: int) -> bool:
        """True if the step may be made; updates the loss scale, if there is one."""
        if self.loss_scale is not None:
            finite = math.isfinite(report.squares)
            self.loss_scale.update(finite=finite)
            return finite
        if not any(row[0] for row in report.marks) and math.isfinite(report.squares + sum(map(sum, report.losses))):
            return True
        for stage in () if self.late is not None else self.placed.stages.values():  # these may have later sums by then
            stage.gradients.wipe()
        if self.nonfinite == "raise":
            raise not_finite(step, report, self.placed.exchange)
        return False
