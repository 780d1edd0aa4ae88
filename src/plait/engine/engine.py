"""The step: forward and backward of every microbatch, one reduction, one update.

    counts      how many samples and targets every rank brings           one small all_gather
    F0 B0 F1 B1 …   units are gathered and freed, gradients reduced      as the row says
    REDUCE      what is still pending
    UPDATE      losses, norm, which parameters have gradients            one small all_gather
                clip, optimizer, publish                                 as the row says

Gradients are sums: ``loss_fn`` returns a sum, the global count of targets is known before the first forward, and
1/count seeds each backward.  That is the only division, and every reduction is a sum, so ragged microbatches and
uneven ranks agree with a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.core.actions import Schedule
from plait.core.cells import Strategy, find_strategy
from plait.core.flat import Cut, UnitLayout
from plait.core.pipeline import Pipeline, Plan
from plait.core.precision import LossScale
from plait.core.styles import Style
from plait.engine.build import check_model, check_settings
from plait.engine.courier import Courier
from plait.engine.evaluation import Evaluation, Evaluator
from plait.engine.exchange import Exchange
from plait.engine.gradients import parameters_of
from plait.engine.guard import ModelGuard
from plait.engine.norm import Norm
from plait.engine.optim import Owned, OwnedOptimizer, owned_runs
from plait.engine.recompute import Recompute
from plait.engine.rng import Draw
from plait.engine.runtime import EventLog, Microbatch, Runtime
from plait.engine.stage import LossFn
from plait.engine.stages import Settings, build_stages
from plait.engine.state import Part, full_state_dict, load_full_state_dict
from plait.engine.step import OpenStep, StepResult, num_samples
from plait.engine.tied import Ties
from plait.engine.unit import Unit, dtype_in
from plait.engine.update import Update, bytes_held
from plait.engine.weights import Weights
from plait.tensor.gemm import find_gemm
from plait.tensor.parallel import parallel_plan

CountFn = Callable[[Any], int]
Listener = Callable[[str, "Engine"], None]


class Engine:
    """A model trained under one row of the table on this rank.

    Args:
        model: any ``nn.Module``; its parameters may have values or be on meta. It stays the user's object, with its
            names; between uses its parameters are placeholders where the row splits them.
        comm: this rank's world; it knows the mesh.
        strategy: a row, its name, or its text.
        optimizer: built on ``model.parameters()`` in the ordinary way; it is pointed at the pieces this rank owns.
        loss_fn: ``(model, batch) -> scalar``, the *sum* of the losses of the batch.
        count_fn: ``batch -> int``, how many terms that sum has.
        units: names of the modules to gather together; None wraps automatically by block.
        cut: ``"element"`` cuts parameters anywhere; ``"tensor"`` gives each to one owner.
        prefetch: how many units are gathered ahead of the running one.
        clip: the largest global gradient norm; ``math.inf`` measures without clipping, None does neither.
        seed: of initial values (of parameters on meta) and dropout.
        weights: where the values of parameters on meta are read, instead of drawing them from the seed.
        tensor_plan: patterns of module names and their styles (see ``core.styles``), for a mesh with a tensor axis;
            None takes the plan that the model carries.
        sequence_parallel: cut the stream between the tensor-parallel products in time.
        schedule: who of the ``pipe`` axis does what when: an order's name (see ``core.orders``), or a schedule written
            by hand; None: 1f1b, or no pipeline where the axis has one rank.
        chunks: stages on each rank, for the order ``interleaved``.
        hold: under a row that splits parameters, how many stages a rank keeps unsharded for its next passes (a row that
            keeps them to the backward holds all in flight); None gathers units one by one in each pass.
        split: how many links of the model each stage has; None: equally many. Links are what the model tells of (see
            ``links``).
        recompute: ``"full"`` runs blocks again in backward, ``"selective"`` attention; None keeps every activation.
        gemm: ``"torch"`` or ``"onednn"``: who multiplies linear layers' fp32 matrices on a CPU (see ``tensor.gemm``).
        loss_scale: the factor of the loss, for gradients that fp16 would lose (see ``precision``).
        listener: called with ``"reduced"`` (gradients are whole, not clipped) and ``"updated"``.

    Raises:
        ValueError: anything that can be known to be wrong before the first step, with the fix.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        *,
        strategy: str | Strategy = "zero3",
        optimizer: Optimizer | None = None,
        loss_fn: LossFn | None = None,
        count_fn: CountFn | None = None,
        units: Iterable[str] | None = None,
        cut: Cut = "element",
        prefetch: int = 1,
        clip: float | None = None,
        seed: int = 0,
        weights: Weights | None = None,
        tensor_plan: Mapping[str, str | Style] | None = None,
        sequence_parallel: bool = False,
        schedule: str | Schedule | None = None,
        chunks: int | None = None,
        hold: int | None = 1,
        split: Sequence[int] | None = None,
        recompute: Recompute | None = None,
        gemm: str = "torch",
        loss_scale: LossScale | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.model, self.comm, self.strategy = model, comm, find_strategy(strategy)
        self.loss_fn, self.count_fn = loss_fn, count_fn
        self.listener, self.seed = listener, seed
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: it is a number of units, from 0")
        check_model(model, comm)
        names = {id(p): n for n, p in model.named_parameters()}
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        sums = {dtype_in(self.strategy.grads, dtype_in(self.strategy.params, p.dtype)) for p in model.parameters()}
        order = schedule if schedule is None or isinstance(schedule, str) else tuple(map(tuple, schedule))
        self.pipeline = Pipeline(order, comm.mesh.pipe, chunks, hold)
        check_settings(
            comm,
            strategy=self.strategy,
            clip=clip,
            cut=cut,
            seed=seed,
            sequence_parallel=sequence_parallel,
            schedule=self.pipeline.order,
            chunks=chunks,
            hold=hold,
            loss_scale=loss_scale,
            split=split if split is None else tuple(split),
            recompute=recompute,
            gemm=gemm,
        )
        parallel = parallel_plan(model, comm.mesh.tensor, tensor_plan, sequence=sequence_parallel)
        named = None if units is None else tuple(units)
        settings = Settings(
            named, cut, seed, prefetch, sequence_parallel, self._before_forward, weights, recompute, find_gemm(gemm)
        )
        built = build_stages(model, comm, self.strategy, self.pipeline, parallel, split, settings)
        self.stages, self.directory = built.stages, built.directory
        self.links, self.split = built.links, built.split
        """The names of the model's links, and how many each stage has."""
        courier = Courier(comm, self.pipeline.owner)
        self.log = EventLog(comm)
        """When each action of the last steps began and ended."""
        self.runtime = Runtime(self.stages, courier, self.log)
        last = self.pipeline.owner[self.pipeline.num_stages - 1]
        self.exchange = Exchange(comm, trainable, last)
        self.steps = 0
        self.optimizer = optimizer
        self.owned: list[Owned] = []
        self.pieces: OwnedOptimizer | None = None
        flat_gradients = [g for stage in self.stages.values() for g in stage.gradients.every]
        if optimizer is None:
            self.owned = owned_runs(flat_gradients)
        else:
            cuts = cut == "element" and comm.mesh.count(self.strategy.optim.split) > 1
            self.pieces = OwnedOptimizer(optimizer, names, flat_gradients, cuts=cuts)
            self.owned = self.pieces.owned
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda *_: self._after_update())
            optimizer.zero_grad = self._discarding(optimizer.zero_grad)  # type: ignore[method-assign]
        self.ties = Ties(built.edges, comm, built.gradients(), courier.rank_of)
        self.norm = Norm(comm, self.strategy, wide=torch.float64 in sums, copies=self.ties.copies)
        whole = [n for n, _, f, i in parameters_of(self.units) if f.trainable and f.cuts[i] is None]
        self.update = Update(
            comm,
            self.stages,
            self.exchange,
            self.ties,
            self.norm,
            self.owned,
            self.pieces,
            clip,
            None if loss_scale is None else replace(loss_scale),
            list(dict.fromkeys(whole)) if parallel.styles else [],
        )
        self._guard = ModelGuard(model)  # what a stage has was taken from it once
        self._plans: dict[int, Plan] = {}
        self._evaluator = Evaluator(model, comm, self.stages, self.pipeline, self.strategy)
        self._broken = False
        self._now: OpenStep | None = None
        self._last = StepResult(-1, math.nan, 0, (), None)

    @property
    def units(self) -> list[Unit]:
        """The units of all stages of this rank."""
        return [unit for stage in self.stages.values() for unit in stage.units]

    # ---- the primitive ------------------------------------------------------------------------------------------

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
        plan = self.plan(num)
        counts = [count_fn(batch) for batch in microbatches]
        samples = [num_samples(batch) for batch in microbatches]
        first, total = self.exchange.counts(num, sum(counts), sum(samples))
        self._now = OpenStep(count=total)  # whatever an earlier step left behind when it raised is gone
        if self.pipeline.num_stages > 1:
            self._guard.check()
        if self.comm.mesh.pipe > 1:
            self.exchange.check_batches(microbatches)
        for stage in self.stages.values():
            stage.begin_step()
        place = self.comm.mesh.data_rank(self.comm.rank) * num
        brought = [
            Microbatch(batch, Draw(self.steps, place + m, first + sum(samples[:m]), samples[m]))
            for m, batch in enumerate(microbatches)
        ]
        self._broken = self.comm.mesh.pipe > 1
        self.runtime.run(plan, brought, loss_fn, 1 / total * self.update.scale, self._update)
        self._broken = False
        return self._last

    def evaluate(self, microbatches: Sequence[Any]) -> Evaluation:
        """The mean loss of all ranks' microbatches, in eval mode; the training goes on as if it had not been.

        Every rank brings equally many, empty ones included.  Under a pipeline a rank keeps what it hands on to the end
        of the call, so bring about as many at once as in a step.

        Raises:
            ValueError: as ``step``; between a forward and the ``optimizer.step()`` of a loop of one's own.
        """
        loss_fn, count_fn = self._functions()
        if self._now is not None and self._now.count is None:
            raise ValueError("engine.evaluate in the midst of a step: call it after optimizer.step() or zero_grad()")
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
                "the step before raised in the midst of a pipeline, and its messages may still be under way: build the "
                "world and the engine anew, and load the last state"
            )
        return self.loss_fn, self.count_fn

    def plan(self, num_microbatches: int) -> Plan:
        """What this rank does in a step of so many microbatches; proved when it is first asked for."""
        if num_microbatches not in self._plans:
            here = self.comm.mesh.coordinates(self.comm.rank)["pipe"]
            schedule = self.pipeline.completed(num_microbatches, self.strategy)
            self._plans[num_microbatches] = Plan.of(schedule, here)
        return self._plans[num_microbatches]

    def _update(self) -> None:
        """The end of the step."""
        assert self._now is not None
        num = len(self.runtime.courier.signatures)
        losses = self.runtime.losses
        self._now.losses = [losses[m] if losses else torch.zeros(()) for m in range(num)]
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self._before_update()
            self._after_update()

    # ---- the thin face for a loop of one's own ------------------------------------------------------------------

    def backward(self, loss: Tensor, count: int) -> None:
        """The backward of one microbatch of a user's own loop; ``optimizer.step()`` then makes the step.

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

    @property
    def last(self) -> StepResult:
        """What the last step did, a user's own loop's too."""
        return self._last

    # ---- parts of a step ----------------------------------------------------------------------------------------

    def _begin_step(self) -> OpenStep:
        if self._now is None:
            for stage in self.stages.values():
                stage.begin_sums()
            self._now = OpenStep()
        return self._now

    def _before_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Hook of the whole model: where in the run this forward stands, for the dropout streams."""
        if not self.model.training or (self._now is not None and self._now.count is not None):
            return  # nothing is drawn, or engine.step has said where this forward stands
        stage = self.stages[0]
        size = num_samples((args, kwargs))
        place = self.comm.mesh.data_rank(self.comm.rank)
        if not torch.is_grad_enabled():
            stage.streams.begin(Draw(self.steps, -1 - place, place * size, size))
            return
        now = self._begin_step()
        first = (now.forwards << 40) + place * size  # how many microbatches will come is not known: number them apart
        stage.streams.begin(Draw(self.steps, place + now.forwards * self.comm.mesh.data_size, first, size))
        stage.number(now.forwards)
        now.forwards += 1

    def _before_update(self) -> None:
        """Hook before ``optimizer.step``: finish the sums, agree, clip, hand the gradients over."""
        now = self._now
        if now is None or not now.losses:
            raise ValueError("optimizer.step() without a backward before it: there is no gradient to step with")
        self._last = self.update.prepare(now, self.steps, lambda: self._tell("reduced"))

    def _discarding(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        """``optimizer.zero_grad`` between backward and step throws the gradients away, as everywhere in torch."""

        def discard(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            self._now = None

        return discard

    def _after_update(self) -> None:
        """Hook after ``optimizer.step``: bring the new values to where the row keeps them."""
        for stage in self.stages.values():
            stage.gathering.forget()
        for unit in self.units:
            unit.publish()
        for unit in self.units:
            unit.settle()  # nobody may leave with a message of ours under way
        for piece in self.owned:
            piece.view.grad = None
        self._now = None
        self.steps += 1
        self._tell("updated")

    def _tell(self, event: str) -> None:
        if self.listener:
            self.listener(event, self)

    # ---- state --------------------------------------------------------------------------------------------------

    def layouts(self) -> tuple[UnitLayout, ...]:
        """The units of this rank as the planner sees them."""
        return tuple(layout for stage in self.stages.values() for layout in stage.layouts())

    def bytes_held(self) -> dict[str, int]:
        """Bytes on this rank between steps, by kind of state, and the peak of gathered parameters."""
        return bytes_held(list(self.stages.values()), self.pieces)

    @property
    def peak_open(self) -> int:
        """The most units that were unsharded at once beside the ancestors of the running one."""
        return max(stage.gathering.peak_open for stage in self.stages.values())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter whole and every buffer (data rank 0's), by the model's own names, on the CPU of every rank.

        All ranks call it together; one unit is gathered at a time.
        """
        return full_state_dict(self.directory, self.parts(), self.comm)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of whole tensors; each rank copies its pieces.

        Raises:
            ValueError: missing or surplus names, or shapes that differ.
        """
        load_full_state_dict(self.directory, self.parts(), state)

    def parts(self) -> list[Part]:
        """This rank's stages, for what goes through the whole model (see ``state``)."""
        return [Part(stage.model, stage.units) for stage in self.stages.values()]
