"""Between a step's last backward and its update: what all ranks agree on.

    sums ──► divided by the loss scale ──► norm, losses, who has a gradient ──► clipped ──► the optimizer's
                                           one small all_gather

Where a loss scale says that this may happen, a step whose sums are not finite is skipped on all ranks: the optimizer is
given no gradient, so neither parameters nor its state change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.comm import Comm
from plait.core.precision import LossScale
from plait.engine.data_parallel.optim import Owned, OwnedOptimizer, clip_factor, scale, square_sum
from plait.engine.exchange import Exchange
from plait.engine.norm import Norm, check_whole
from plait.engine.pipeline.stage import Stage
from plait.engine.pipeline.tied_weights import TiedWeights
from plait.engine.step import OpenStep, StepResult


@dataclass
class Update:
    """The end of every step; ``owned`` is what this rank updates."""

    comm: Comm
    stages: Mapping[int, Stage]
    exchange: Exchange
    ties: TiedWeights
    norm: Norm
    owned: Sequence[Owned]
    optimizer: OwnedOptimizer | None
    clip: float | None
    loss_scale: LossScale | None
    unchecked: list[str]
    """Parameters whose gradients are yet to be compared over the tensor ranks."""
    made: bool = True
    """Whether the last step was."""
    have_gradient: dict[str, bool] = field(default_factory=dict)
    """Which parameters got a gradient on any rank in the last step."""

    @property
    def scale(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def prepare(self, now: OpenStep, step: int, reduced: Callable[[], None]) -> StepResult:
        """Finish the sums, agree, clip, hand the gradients over.

        Args:
            step: its number.
            reduced: called when gradients are whole, and not clipped yet.
        """
        for stage in self.stages.values():
            stage.gradients.reduce()
        self.ties.reduce()
        gradients = [o.gradient for o in self.owned]  # run by run: vector tails then fall where a whole tensor's do
        factor = 1 / self.scale
        if now.count is None:
            _, now.count = self.exchange.counts(len(now.losses), now.local_count, 0)
            factor /= now.count
        if factor != 1:
            scale(gradients, factor)
        losses = tuple(loss.item() for loss in now.losses)
        measured = self.clip is not None or self.loss_scale is not None
        squares = square_sum(o.gradient for o in self.owned if self.norm.counts(o)) if measured else 0.0
        touched = {name for stage in self.stages.values() for name in stage.gradients.touched()}
        total, losses_by_rank, self.have_gradient = self.exchange.report(squares, losses, touched)
        losses = tuple(losses_by_rank[self.comm.mesh.data_rank(self.comm.rank)])
        if checked := [name for name in self.unchecked if self.have_gradient[name]]:
            zero = check_whole(self.norm, self.owned, self.exchange, checked)
            self.unchecked = [name for name in self.unchecked if name in zero or name not in checked]
        if self.loss_scale is not None:
            self.made = math.isfinite(total)
            self.loss_scale.update(finite=self.made)
        reduced()
        norm = None
        if self.clip is not None and self.made:
            norm = self.norm.rounded(math.sqrt(total))
            factor = clip_factor(norm, self.clip)
            if factor < 1:
                scale(gradients, factor)
        if self.optimizer is not None:
            self.optimizer.give_gradients(self.have_gradient if self.made else dict.fromkeys(self.have_gradient, False))
        summed = math.fsum(loss for of_rank in losses_by_rank for loss in of_rank)
        return StepResult(step, summed / now.count, now.count, losses, norm, self.made)
