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

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.forward.context import RNGPosition, token_counts
from plait.pipeline.runtime import Microbatch
from plait.pipeline.stage import LossFn
from plait.step.drift import DriftCheck
from plait.step.evaluation import Evaluation, Evaluator
from plait.step.host_random import HostRandomness
from plait.step.nonfinite import NonFinite
from plait.step.own_loop import OwnLoop
from plait.step.reduction import returning_sums
from plait.step.standing import Standing
from plait.step.step import OpenStep, StepResult, num_samples, whole_count
from plait.step.turns import Optimizers, StepTurns, check_no_closure, is_inner, several
from plait.step.update import Update
from plait.table.parallelism import Parallelism
from plait.table.precision import LossScale
from plait.zero.shown import ShownGradients
from plait.zero.state.identity import code_of
from plait.zero.state.weights import Weights
from plait.zero.step_hooks import watch_hooks
from plait.zero.unshard import EVALUATE

CountFn = Callable[[Any], int]
Listener = Callable[[str, "Engine"], None]


class Engine(OwnLoop):
    """A model trained under one row of the table on this rank.

    Args:
        model: any ``nn.Module``; its parameters may have values or be on meta. It stays the user's object; its
            parameters are placeholders between uses where the row splits them.
        comm: this rank's world; it knows the mesh.
        parallelism: how the model lies on the ranks; or give its fields as keywords (``strategy="zero3"``).
        optimizer: built on ``model.parameters()`` in the ordinary way; it is pointed at the pieces that this rank owns.
            Or several, as a list or a dict, each with parameters of its own. One that is built later: see ``use``.
        loss_fn: ``(model, batch) -> scalar``, the *sum* of the losses of the batch.
        count_fn: ``batch -> int``, how many terms that sum has.
        clip: the largest global gradient norm; ``math.inf`` measures without clipping, None does neither.
        seed: of initial values (of parameters on meta) and dropout.
        weights: where the values of parameters on meta are read, instead of drawing them from the seed.
        loss_scale: the factor of the loss, for gradients that fp16 would lose (see ``precision``).
        nonfinite: what to do with a step in which any rank has a loss or gradient that is inf or NaN: ``"raise"`` a
            FloatingPointError on all ranks, or ``"skip"`` the update on all of them. With a loss scale it is skipped.
        check_drift: steps between two checks that ranks which hold the same state have the same bits; 0: none.
        listener: called with ``"reduced"`` (gradients are whole, and may be changed before their norm is measured),
            ``"agreed"`` (not clipped yet) and ``"updated"``.

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
        optimizer: Optimizers | None = None,
        loss_fn: LossFn | None = None,
        count_fn: CountFn | None = None,
        clip: float | None = None,
        seed: int = 0,
        weights: Weights | None = None,
        loss_scale: LossScale | None = None,
        nonfinite: NonFinite = "raise",
        check_drift: int = 0,
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
            several(optimizer),
            seed=seed,
            weights=weights,
            settings={"clip": clip, "loss_scale": loss_scale, "nonfinite": nonfinite, "check_drift": check_drift},
            agreed={"the code of loss_fn": code_of(loss_fn), "the code of count_fn": code_of(count_fn)},
            before_forward=self._before_forward,
        )
        self.loss_fn, self.count_fn, self.listener = loss_fn, count_fn, listener
        self.update = Update(self, clip, loss_scale, nonfinite)
        self._drift = DriftCheck(self, check_drift)
        self._turns, self._shown = StepTurns(), ShownGradients()
        self._host = HostRandomness(model, loss_fn)
        for one in self.optimizers:
            self._hook(one)
        self.steps = 0
        self.discarded = 0
        """Times that ``zero_grad`` threw gradients away."""
        self._blocks = self._modified = 0
        if self.pipeline.num_stages == 1:  # else a program calls no forward
            model.register_forward_hook(self._after_forward)
            self.stages[0].interceptor.remember()  # the hook is the engine's
        self._evaluator = Evaluator(self)
        self._broken = False
        self._now: OpenStep | None = None
        self._forwards = 0
        """Of the step under way, in a loop of one's own: they number its dropout masks."""
        self.last = StepResult(-1, math.nan, 0, (), None)
        """What the last step did, in a loop of one's own too."""

    def __repr__(self) -> str:
        where = f"{self.strategy.name} on {self.comm.mesh}, rank {self.comm.rank}"
        return f"Engine({where}: {len(self.units)} units of {self.num_parameters:,} parameters)"

    def use(self, optimizer: Optimizers) -> None:
        """Take optimizers that were built after the engine, on ``model.parameters()``; all ranks call it together.

        Raises:
            ValueError: the engine has optimizers already, and what ``Engine`` raises for these.
        """
        if self.optimizers:
            raise ValueError("the engine has an optimizer already: give Engine a list, or use, all of them at once")
        self.take_optimizers(several(optimizer))
        for one in self.optimizers:
            self._hook(one)

    def _hook(self, optimizer: Optimizer) -> None:
        own = set[int]()

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not is_inner(optimizer):
                check_no_closure((*args, *kwargs.values()))
                self._watch_hooks(optimizer, own)
                self._before_update(optimizer)

        def after(*_: Any) -> None:
            if not is_inner(optimizer):
                self._after_update(optimizer)

        first, hooks = optimizer.register_step_pre_hook(before), optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]  # the program's see summed gradients
        own |= {first.id, optimizer.register_step_post_hook(after).id}
        self._watch_hooks(optimizer, own)
        optimizer.zero_grad = partial(self._discard, optimizer, optimizer.zero_grad)  # type: ignore[method-assign]

    def _watch_hooks(self, optimizer: Optimizer, own: Collection[int]) -> None:
        if self.owned_optimizer is not None and self.owned_optimizer.gives_pieces:
            watch_hooks(optimizer, own, lambda: self._modified)

    def step(self, microbatches: Sequence[Any]) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank brings equally many.

        Raises:
            ValueError: no microbatch, ranks that disagree on their number, nothing to count, no loss function.
            FloatingPointError: a loss or gradient that is not finite, on any rank (see ``nonfinite``).
        """
        loss_fn, count_fn = self._functions()
        if not torch.is_grad_enabled():
            raise ValueError("engine.step under torch.no_grad(): there would be no gradient; call it outside")
        self._check_optimizer()
        num = len(microbatches)
        if not num:
            raise ValueError("no microbatch: a step needs at least one, an empty one included")
        program = self.program(num)
        self.comm.begin_step(self.steps)
        counts = [whole_count(count_fn(batch)) for batch in microbatches]
        if min(counts) < 0:  # the sum goes to the others, and they refuse it too
            counts = [min(counts)]
        samples = [num_samples(batch) for batch in microbatches]
        brought = microbatches if self.comm.mesh.pipe * self.comm.mesh.tensor > 1 else ()
        first, total = self.exchange.counts(num, sum(counts), sum(samples), self._guard.frozen(), brought)
        self._shown.hide()
        self._now = OpenStep(count=total)  # whatever an earlier step left behind when it raised is gone
        if self.pipeline.num_stages > 1:
            self._guard.check()
        self.exchange.check_batches(microbatches)
        for stage in self.stages.values():
            stage.begin_step()
        place = self.comm.mesh.data_rank(self.comm.rank) * num
        brought = []
        for m, batch in enumerate(microbatches):
            lengths = token_counts(batch, samples[m])
            position = RNGPosition(self.steps, place + m, first + sum(samples[:m]), samples[m], lengths)
            brought.append(Microbatch(batch, position))
        self._broken = self.comm.mesh.pipe > 1
        self._host.begin(self.steps)
        loss_fn = loss_fn if self.steps else returning_sums(loss_fn, count_fn)
        self.runtime.run(program, brought, loss_fn, 1 / total * self.update.scale, self._update)
        return self.last

    def evaluate(self, microbatches: Sequence[Any]) -> Evaluation:
        """The mean loss of all ranks' microbatches, in eval mode; training continues as if it had not happened.

        Every rank brings equally many, empty ones included.  Under a pipeline a rank keeps until the end of the call
        what it hands on, so bring about as many at once as in a step.

        Raises:
            ValueError: as ``step``; between a forward and the ``optimizer.step()`` of a loop of one's own.
        """
        loss_fn, count_fn = self._functions()
        if self._now is not None and (self._now.count is None or self._now.prepared):
            raise ValueError("engine.evaluate in the middle of a step: call it after optimizer.step() or zero_grad()")
        self._guard.check()
        for stage in self.stages.values():
            stage.program.follow()
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
        self._broken = False  # every message of the pipeline has come
        self._host.check(alone=True)
        num = self.runtime.num_microbatches
        losses = self.runtime.losses
        self._now.losses = [losses[m] if losses else torch.zeros(()) for m in range(num)]
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.optimizers:
            self._begin_update()
            self._publish()

    def _begin_step(self) -> OpenStep:
        self._turns.check_all(self.optimizers)
        if self._now is None:
            for stage in self.stages.values():
                stage.begin_sums()
            self.comm.begin_step(self.steps)
            self._now = OpenStep()
        return self._now

    def _before_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Hook of the whole model: where in the run this forward stands, for dropout."""
        self._turns.check_all(self.optimizers)  # some parameters would be new, others old, and which depends on the row
        if self._gathers:
            self.comm.wrote_common(later=True)  # a program may have written to this rank's pieces
        now = self._now
        if (now is not None and now.count is not None and not now.prepared) or self.pipeline.num_stages > 1:
            return  # engine.step has said where this forward stands
        stage = self.stages[0]
        if torch.is_grad_enabled():
            stage.look_at_model()
        if not self.model.training:
            return  # nothing is drawn
        size = _samples_of((args, kwargs))
        lengths = token_counts((args, kwargs), size)
        place, ranks = self.comm.mesh.data_rank(self.comm.rank), self.comm.mesh.data_size
        # as if all ranks brought equally many samples, and apart from those of ranks that do not
        here = (size * ranks << 80) + place * size
        if not torch.is_grad_enabled():
            stage.begin_alone(RNGPosition(self.steps, -1 - place, here, size, lengths))
            return
        self._begin_step()
        self._host.begin(self.steps)
        first = here + (self._forwards << 40)  # how many microbatches will come is not known: number them apart
        microbatch = place + self._forwards * ranks
        stage.begin_alone(RNGPosition(self.steps, microbatch, first, size, lengths), self._forwards)
        self._forwards += 1

    @property
    def _gathers(self) -> bool:
        """Whether a forward gathers anything; in ``engine.gathered()`` it does not, and ranks may run other numbers."""
        return any(unit.split and not unit.pinned for unit in self.units)

    def _after_forward(self, *_: Any) -> None:
        """Hook of the whole model: behind a forward that reads only, a program may write to this rank's pieces."""
        if not torch.is_grad_enabled() and self.stages[0].unsharding.phase != EVALUATE and self._gathers:
            self.comm.wait_for_readers()

    def _before_update(self, optimizer: Optimizer) -> None:
        """Hook before ``optimizer.step``; the first optimizer of a step makes the gradients of all."""
        if self._turns.begin(optimizer, self.optimizers):
            self._begin_update()
        self.comm.wait_for_readers()  # a program may have read parameters since the ranks agreed

    def _begin_update(self) -> None:
        if self._blocks:
            raise ValueError("optimizer.step() inside of `with engine.gathered()` or an average: leave the block first")
        if self._now is None or not self._now.prepared:
            self._prepare(self.update.clip)
        self.take_new_groups()
        if self._shown:
            self._shown.hide(but=set(self.exchange.names) - self._in_optimizers())
        self.take_over()
        self._drift.after(self.steps, {"the seed": self.seed, "the loss scale": self.update.scale})

    def _prepare(self, clip: float | None) -> None:
        """Finish the sums, agree, clip, hand the gradients over."""
        now = self._now
        if now is None or not now.losses:
            raise ValueError("optimizer.step() without a backward before it: there is no gradient to step with")
        self._shown.check()
        now.prepared = True
        try:
            standing = Standing.of(self.steps, self.discarded, self.optimizers)
            frozen = self._guard.frozen()
            self.last = self.update.prepare(now, frozen, standing, clip, self._tell)
        except BaseException:
            self._shown.hide()
            self._now, self._forwards = None, 0  # its sums are used up
            self._turns.clear()
            raise

    def _discard(self, optimizer: Optimizer, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``optimizer.zero_grad`` between backward and step throws away what the step has summed so far."""
        if self._shown:
            self._shown.hide()
        zero_grad(*args, **kwargs)
        if self._now is not None and self._turns.zeroed(optimizer, self.optimizers, summed=bool(self._now.losses)):
            if self._now.losses:  # else it stands between a forward, which has drawn its masks, and its backward
                self.discarded, self._forwards = self.discarded + 1, 0
            self.update.weighted.begin_step()
            self._now = None

    def _after_update(self, optimizer: Optimizer) -> None:
        """Hook after ``optimizer.step``; behind the last optimizer of a step the new values are published."""
        if self.owned_optimizer is not None:
            self.owned_optimizer.after_step(optimizer)
        if self._turns.end(optimizer, self.optimizers):
            self._publish()
        else:
            self.comm.wrote_common()

    def _publish(self) -> None:
        """Bring the new values to where the row keeps them."""
        for stage in self.stages.values():
            stage.unsharding.pins.end_step()
        self.publish()
        for piece in self.owned:
            if piece.view.grad is not piece.gradient:  # memory of its own; the other stays for who looks behind a step
                piece.view.grad = None
        self._now, self._forwards = None, 0
        self.steps += 1
        self._tell("updated")

    def _tell(self, event: str) -> None:
        if self.listener:
            self.listener(event, self)


def _samples_of(call: Any) -> int:
    """How many samples a call of the model has; none where it has no tensor (a module around one parameter), so that
    whatever is drawn in it belongs to the microbatch."""
    try:
        return num_samples(call)
    except ValueError:
        return 0
