"""The step: forward and backward of every microbatch, one reduction, one update.

    engine.step
      counts                how many samples and targets every rank brings        one small all_gather
      runtime.run           F0 B0 F1 B1 ...: units are unsharded and resharded,
                            gradients reduced                                     as the row says
        update              the last action of the schedule
          optimizer.step    the user's own object, whose hooks are ours:
            pre-hook        update.prepare: what is still pending is summed;      as the row says
                            losses, norm, which parameters have gradients;        one small all_gather
                            clipped, and handed to the optimizer
            the optimizer   on the pieces that this rank owns
            post-hook       publish: new values go to where the row keeps them    as the row says

In a loop of one's own the user calls ``optimizer.step()``, and the same hooks make the same step.

Gradients are sums: ``loss_fn`` returns a sum, the global count of targets is known before the first forward, and
1/count seeds each backward.  That is the only division, and every reduction is a sum, so ragged microbatches and
uneven ranks agree with a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.core.parallelism import Parallelism
from plait.core.precision import LossScale
from plait.engine.evaluation import Evaluation, Evaluator
from plait.engine.forward.context import RNGPosition
from plait.engine.pipeline.runtime import Microbatch
from plait.engine.pipeline.stage import LossFn
from plait.engine.placed_model import PlacedModel
from plait.engine.state.weights import Weights
from plait.engine.step import OpenStep, StepResult, num_samples

CountFn = Callable[[Any], int]
Listener = Callable[[str, "Engine"], None]


class Engine(PlacedModel):
    """A model trained under one row of the table on this rank.

    Args:
        model: any ``nn.Module``; its parameters may have values or be on meta. It stays the user's object; its
            parameters are placeholders between uses where the row splits them.
        comm: this rank's world; it knows the mesh.
        parallelism: how the model lies on the ranks; or give its fields as keywords (``strategy="zero3"``).
        optimizer: built on ``model.parameters()`` in the ordinary way; it is pointed at the pieces that this rank owns.
        loss_fn: ``(model, batch) -> scalar``, the *sum* of the losses of the batch.
        count_fn: ``batch -> int``, how many terms that sum has.
        clip: the largest global gradient norm; ``math.inf`` measures without clipping, None does neither.
        seed: of initial values (of parameters on meta) and dropout.
        weights: where the values of parameters on meta are read, instead of drawing them from the seed.
        loss_scale: the factor of the loss, for gradients that fp16 would lose (see ``precision``).
        listener: called with ``"reduced"`` (gradients are whole, not clipped) and ``"updated"``.

    Raises:
        ValueError: anything that can be known to be wrong before the first step, with the fix.
        TypeError: an unknown keyword.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        *,
        parallelism: Parallelism | None = None,
        optimizer: Optimizer | None = None,
        loss_fn: LossFn | None = None,
        count_fn: CountFn | None = None,
        clip: float | None = None,
        seed: int = 0,
        weights: Weights | None = None,
        loss_scale: LossScale | None = None,
        listener: Listener | None = None,
        **settings: Any,
    ) -> None:
        if parallelism is not None and settings:
            raise ValueError(
                f"parallelism together with {', '.join(settings)}, which it has a field for: give one of them, as in "
                f"dataclasses.replace(parallelism, ...)"
            )
        super().__init__(
            model,
            comm,
            parallelism or Parallelism.of(**settings),
            optimizer,
            clip=clip,
            seed=seed,
            weights=weights,
            loss_scale=loss_scale,
            before_forward=self._before_forward,
        )
        self.loss_fn, self.count_fn, self.listener = loss_fn, count_fn, listener
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda *_: self._after_update())
            optimizer.zero_grad = partial(self._discard, optimizer.zero_grad)  # type: ignore[method-assign]
        self.steps = 0
        self._evaluator = Evaluator(self)
        self._broken = False
        self._now: OpenStep | None = None
        self.last = StepResult(-1, math.nan, 0, (), None)
        """What the last step did, in a loop of one's own too."""

    def step(self, microbatches: Sequence[Any]) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank brings equally many.

        Raises:
            ValueError: no microbatch, ranks that disagree on their number, nothing to count, no loss function.
        """
        loss_fn, count_fn = self._functions()
        if not torch.is_grad_enabled():
            raise ValueError("engine.step under torch.no_grad(): there would be no gradient; call it outside")
        num = len(microbatches)
        if not num:
            raise ValueError("no microbatch: a step needs at least one, an empty one included")
        program = self.program(num)
        counts = [count_fn(batch) for batch in microbatches]
        samples = [num_samples(batch) for batch in microbatches]
        first, total = self.exchange.counts(num, sum(counts), sum(samples))
        self._now = OpenStep(count=total)  # whatever an earlier step left behind when it raised is gone
        if self.pipeline.num_stages > 1:
            self._guard.check()
        self.exchange.check_batches(microbatches)
        for stage in self.stages.values():
            stage.begin_step()
        place = self.comm.mesh.data_rank(self.comm.rank) * num
        brought = [
            Microbatch(batch, RNGPosition(self.steps, place + m, first + sum(samples[:m]), samples[m]))
            for m, batch in enumerate(microbatches)
        ]
        self._broken = self.comm.mesh.pipe > 1
        self.runtime.run(program, brought, loss_fn, 1 / total * self.update.scale, self._update)
        self._broken = False
        return self.last

    def evaluate(self, microbatches: Sequence[Any]) -> Evaluation:
        """The mean loss of all ranks' microbatches, in eval mode; training continues as if it had not happened.

        Every rank brings equally many, empty ones included.  Under a pipeline a rank keeps until the end of the call
        what it hands on, so bring about as many at once as in a step.

        Raises:
            ValueError: as ``step``; between a forward and the ``optimizer.step()`` of a loop of one's own.
        """
        loss_fn, count_fn = self._functions()
        if self._now is not None and self._now.count is None:
            raise ValueError("engine.evaluate in the middle of a step: call it after optimizer.step() or zero_grad()")
        self._guard.check()
        return self._evaluator.evaluate(microbatches, loss_fn, count_fn)

    def _functions(self) -> tuple[LossFn, CountFn]:
        if self.loss_fn is None or self.count_fn is None:
            raise ValueError(
                "engine.step and engine.evaluate need loss_fn and count_fn: give them to Engine, or use "
                "engine.backward in your own loop"
            )
        if self._broken or self._evaluator.broken:
            raise ValueError(
                "the last step failed inside a pipeline, and its messages may still be under way: build the "
                "world and the engine anew, and load the last state"
            )
        return self.loss_fn, self.count_fn

    def _update(self) -> None:
        """The end of the step."""
        assert self._now is not None
        num = len(self.runtime.p2p.signatures)
        losses = self.runtime.losses
        self._now.losses = [losses[m] if losses else torch.zeros(()) for m in range(num)]
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self._before_update()
            self._after_update()

    # ---- for a loop of one's own --------------------------------------------------------------------------------

    def backward(self, loss: Tensor, count: int) -> None:
        """The backward of one microbatch of a user's own loop.

        Args:
            loss: the *sum* of the microbatch's losses.
            count: how many terms it has; ``optimizer.step()`` divides by the global sum of the counts.
        """
        if self.pipeline.num_stages > 1:
            raise ValueError("engine.backward is for one stage: under a pipeline the schedule decides; use engine.step")
        if loss.dim() != 0:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: return the sum over the microbatch, a scalar")
        now = self._begin_step()
        now.local_count += count
        self.stages[0].backward_from(loss, self.update.scale)
        now.losses.append(loss.detach())

    # ---- parts of a step ----------------------------------------------------------------------------------------

    def _begin_step(self) -> OpenStep:
        if self._now is None:
            for stage in self.stages.values():
                stage.begin_sums()
            self._now = OpenStep()
        return self._now

    def _before_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Hook of the whole model: where in the run this forward stands, for dropout."""
        if not self.model.training or (self._now is not None and self._now.count is not None):
            return  # nothing is drawn, or engine.step has said where this forward stands
        stage = self.stages[0]
        size = num_samples((args, kwargs))
        place = self.comm.mesh.data_rank(self.comm.rank)
        if not torch.is_grad_enabled():
            stage.begin_alone(RNGPosition(self.steps, -1 - place, place * size, size))
            return
        now = self._begin_step()
        first = (now.forwards << 40) + place * size  # how many microbatches will come is not known: number them apart
        microbatch = place + now.forwards * self.comm.mesh.data_size
        stage.begin_alone(RNGPosition(self.steps, microbatch, first, size), now.forwards)
        now.forwards += 1

    def _before_update(self) -> None:
        """Hook before ``optimizer.step``: finish the sums, agree, clip, hand the gradients over."""
        now = self._now
        if now is None or not now.losses:
            raise ValueError("optimizer.step() without a backward before it: there is no gradient to step with")
        self.last = self.update.prepare(now, self.steps, lambda: self._tell("reduced"))

    def _discard(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``optimizer.zero_grad`` between backward and step throws the gradients away, as everywhere in torch."""
        zero_grad(*args, **kwargs)
        self._now = None

    def _after_update(self) -> None:
        """Hook after ``optimizer.step``: bring the new values to where the row keeps them."""
        for stage in self.stages.values():
            stage.unsharding.forget()
        for work in [work for unit in self.units for work in unit.publish()]:
            work.wait()  # before anyone reads a parameter, or exits
        for piece in self.owned:
            piece.view.grad = None
        self._now = None
        self.steps += 1
        self._tell("updated")

    def _tell(self, event: str) -> None:
        if self.listener:
            self.listener(event, self)
