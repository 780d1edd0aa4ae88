"""The engine: forward and backward of every microbatch, one reduction, one update (docs/guide/a-step.md).

``step`` makes a whole step.  A program's own loop calls ``engine.backward(loss, count)`` for each microbatch, then
``optimizer.step()``; the engine reduces before its update and publishes after it.

Gradients are sums: the loss is a sum, or a mean times its count, and the step divides once, by the global count of
targets.  So ragged microbatches and uneven ranks agree with a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.forward.context import RNGPosition, token_counts
from plait.forward.stays import StaysHere
from plait.pipeline.runtime import Microbatch
from plait.pipeline.stage import LossFn
from plait.step.evaluation import Evaluation, Evaluator
from plait.step.gathered import gathered, units_of
from plait.step.metrics import gathered_rows, sum_over_ranks
from plait.step.nonfinite import NonFinite
from plait.step.norm import check_limit
from plait.step.optimizer_hooks import drive
from plait.step.placed_model import PlacedModel
from plait.step.reduce import Reducer, position_of
from plait.step.reduction import Reduction, as_sum, returning_sums, terms_of
from plait.step.step import OpenStep, StepResult, num_samples, samples_of, whole_count
from plait.step.watcher import Event, Watcher
from plait.table.parallelism import Parallelism
from plait.table.precision import LossScale
from plait.zero.elementwise import Optimizers, has_stepped, several
from plait.zero.state.full import full_state_dict, load_full_state_dict, load_weights
from plait.zero.state.identity import code_of
from plait.zero.state.weights import Weights
from plait.zero.unshard import EVALUATE

CountFn = Callable[[Any], int]


class Engine(StaysHere):
    """A model trained under one row of the table on this rank.

    Args:
        model: any ``nn.Module``; its parameters may have values or be on meta. If the row splits parameters, they
            have values only while a forward or backward reads them, or inside ``engine.gathered()``.
        comm: this rank's world; it knows the mesh.
        parallelism: how the model is cut over the ranks; or give its fields as keywords (``strategy="zero3"``).
        optimizer: built on ``model.parameters()`` in the ordinary way; the lists in its groups are replaced by the
            pieces that this rank owns. Or several, as a list or a dict. For one that is built later, see ``use``.
        loss_fn: ``(model, batch) -> scalar``, the *sum* of the losses of the batch.
        count_fn: ``batch -> int``, the number of terms of that sum.
        clip: the largest global gradient norm; ``math.inf`` measures without clipping, None does neither.
        seed: the seed of initial values (of parameters on meta) and of dropout.
        weights: the source of values for parameters on meta, instead of drawing them from the seed.
        loss_scale: the factor of the loss, for gradients that fp16 would lose.
        nonfinite: the response to a loss or gradient on any rank that is inf or NaN: ``"raise"`` a
            FloatingPointError on all ranks, or ``"skip"`` the update on all of them. With a loss scale it is skipped.
        listener: called with every event of a step and the engine (see ``step/watcher.py``).

    Raises:
        ValueError: any mistake that can be found before the first step, with the fix.
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
        listener: Watcher | None = None,
        **settings: Any,
    ) -> None:
        if parallelism is not None and settings:
            raise ValueError(
                f"parallelism together with {', '.join(settings)}, which it has a field for: give one of them, as in "
                f"dataclasses.replace(parallelism, ...)"
            )
        check_limit(clip)
        self.placed = PlacedModel(
            model,
            comm,
            parallelism or Parallelism.of(**settings),
            several(optimizer),
            seed=seed,
            weights=weights,
            settings={"clip": clip, "loss_scale": loss_scale, "nonfinite": nonfinite},
            agreed={"the code of loss_fn": code_of(loss_fn), "the code of count_fn": code_of(count_fn)},
            before_forward=self._before_forward,
        )
        self.model, self.comm, self.seed, self.clip = model, comm, seed, clip
        self.loss_fn, self.count_fn = loss_fn, count_fn
        self.reducer = Reducer(self.placed, loss_scale, nonfinite)
        """Runs from the last backward to the optimizer: sums, norm, clipping."""
        self.steps = 0
        """The number of steps made."""
        self.last = StepResult(-1, math.nan, 0, (), None)
        """The numbers of the last step."""
        self._discarded = 0  # times that gradients were thrown away
        self._blocks = 0  # open gathered or swapped blocks
        self._forwards = 0  # forwards of the own loop's step so far
        self._looks = 0  # losses that were checked
        self._broken = False  # a step failed in a pipeline
        self._gave_pieces = False  # ``parameters()`` was called
        self._open: OpenStep | None = None
        """The step under way."""
        self._stepped: list[Optimizer] = []
        for one in self.optimizers:
            drive(one, self)
        self._evaluator = Evaluator(self.placed)
        if self.placed.num_stages == 1:  # otherwise a program calls no forward
            model.register_forward_hook(self._after_forward)
        self.listener = listener
        self._watchers: list[Watcher] = [*(make(self) for make in comm.engine_watchers), *filter(None, [listener])]

    def __repr__(self) -> str:
        where = f"{self.placed.strategy.name} on {self.comm.mesh}, rank {self.comm.rank}"
        return f"Engine({where}: {len(self.placed.units)} units of {self.placed.num_parameters:,} parameters)"

    # ---- optimizers -------------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """The pieces that this rank owns, for an optimizer that is given to ``use``, or that the program steps by
        itself between ``reduce`` and ``publish``.

        Each has a ``piece``: its parameter's ``name``, and in ``piece.place`` the whole ``shape`` and the regions.

        Raises:
            ValueError: this rank owns none.
        """
        if not self.placed.owned:
            raise ValueError("this rank owns no piece: build the optimizer on model.parameters(), for engine.use(...)")
        self._gave_pieces = True
        return [owned.view for owned in self.placed.owned]

    @property
    def optimizer(self) -> Optimizer | None:
        """The only optimizer; None if there is none, ValueError if there are several."""
        if len(self.optimizers) > 1:
            raise ValueError(f"the engine has {len(self.optimizers)} optimizers: see engine.optimizers")
        return self.optimizers[0] if self.optimizers else None

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers, in the order in which they were given."""
        return self.placed.optimizers

    def use(self, optimizer: Optimizers) -> None:
        """Takes optimizers that were built after the engine, on ``model.parameters()`` or ``engine.parameters()``.

        All ranks call it together.

        Raises:
            ValueError: the engine has optimizers already, and any error that ``Engine`` raises for these.
        """
        if self.optimizers:
            raise ValueError("the engine has an optimizer already: give Engine a list, or use, all of them at once")
        self.placed.take_optimizers(several(optimizer))
        for one in self.optimizers:
            drive(one, self)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self, microbatches: Iterable[Any]) -> StepResult:
        """Makes one optimizer step on this rank's microbatches; every rank passes equally many.

        Raises:
            ValueError: no microbatch, ranks that disagree on their number, nothing to count, no loss function.
            FloatingPointError: a loss or gradient that is not finite, on any rank (see ``nonfinite``).
        """
        placed, comm = self.placed, self.comm
        loss_fn, count_fn = self._functions()
        if not torch.is_grad_enabled():
            raise ValueError("engine.step under torch.no_grad(): there would be no gradient; call it outside")
        self._check_optimizers()
        if self._gave_pieces and not self.optimizers:
            raise ValueError("engine.step makes the update itself: call engine.use(optimizer), or keep to a loop")
        if self._open is not None and self._open.own_loop and self._open.losses:
            raise ValueError("engine.step after engine.backward drops its gradient: call optimizer.step() before")
        if not (num := len(given := list(microbatches))):
            raise ValueError("no microbatch: a step needs at least one, an empty one included")
        program = placed.program(num)
        # Phase 1: the ranks agree on counts.
        comm.begin_step(self.steps)
        microbatches, whole = placed.cut_in_time(given, count_fn)
        counts = [whole_count(count_fn(batch)) for batch in microbatches]
        samples = [num_samples(batch) for batch in microbatches]
        first, total = placed.exchange.counts(num, sum(counts), sum(samples), placed.frozen(), given, whole)
        # Phase 2: every microbatch gets its place in the run.
        self._close()  # drops the remains of an earlier step that raised
        self._open = OpenStep(count=total)
        for stage in placed.stages.values():
            stage.begin_step()
        self._tell("begun")
        before = comm.data_rank * num  # microbatches of the data ranks before
        brought = []
        for m, batch in enumerate(microbatches):
            lengths = token_counts(batch, samples[m])
            position = RNGPosition(self.steps, before + m, first + sum(samples[:m]), samples[m], lengths)
            brought.append(Microbatch(batch, position))
        # Phase 3: the schedule; its last action is the update.
        self._broken = comm.mesh.pipe > 1
        loss_fn = loss_fn if self.steps else returning_sums(loss_fn, count_fn)
        placed.runtime.run(program, brought, loss_fn, 1 / total * self.reducer.scale, self._update)
        return self.last

    def _update(self) -> None:
        """Ends the step; the schedule calls it as its last action."""
        assert self._open is not None
        self._broken = False  # every message of the pipeline has come
        num, losses = self.placed.runtime.num_microbatches, self.placed.runtime.losses
        self._open.losses = [losses[m] if losses else torch.zeros((), device=self.comm.device) for m in range(num)]
        self._tell("backward")
        for optimizer in self.optimizers:
            optimizer.step()  # it reduces before and publishes after (optimizer_hooks)
        if not self.optimizers:
            self.reduce()
            self.publish()

    def backward(
        self,
        loss: Tensor,
        count: int | None = None,
        reduction: Reduction | None = None,
        *,
        also: Sequence[Engine] = (),
        retain_graph: bool | None = None,
    ) -> None:
        """Runs the backward of one microbatch of a program's own loop.

        Args:
            loss: the loss of the microbatch, a scalar.
            count: the number of terms of the loss; the step divides by the global sum of the counts.
            reduction: ``"mean"``, as in ``F.cross_entropy`` and Hugging Face's models, or ``"sum"``. None: a sum,
                unless autograd shows a mean, which is refused.
            also: other engines whose models contribute to the loss. Their parameters get gradients too.
            retain_graph: refused if true: each forward has one backward.

        Raises:
            ValueError: no count, no optimizer, a loss that is not a scalar, a mean given as a sum, a negative count.
        """
        terms = terms_of(loss, count, retain_graph)
        engines = (self, *also)
        for engine in engines:
            if engine.placed.num_stages > 1:
                raise ValueError("engine.backward is for one stage: a pipeline's schedule decides; use engine.step")
            if also and engine.reducer.loss_scale is not None:
                raise ValueError(
                    "a backward of several engines, one of which scales the loss: build it without a scale"
                )
            engine._check_optimizers()
        loss = as_sum(loss, terms, reduction, self._looks)
        self._looks += 1
        opened = [engine._begin_step() for engine in engines]
        with ExitStack() as stack:
            for step, engine in zip(opened, engines, strict=True):
                if step.reduced:
                    raise ValueError("engine.backward after engine.reduce: reduce after the last backward of the step")
                engine._tell("differentiating")
                if engine is not self:
                    stack.enter_context(engine.placed.stages[0].taking_part())
            try:
                self.placed.stages[0].backward_from(loss, self.reducer.scale)
            except BaseException:  # some gradients were added, others were not
                for engine in engines:
                    engine._throw_away(had_gradients=True)
                raise
        for step, engine in zip(opened, engines, strict=True):
            step.local_count += terms
            step.losses.append(loss.detach())
            engine._tell("backward")

    def reduce(self, clip: float | None = None) -> StepResult:
        """Finishes the sums, agrees on the step's numbers, clips, and gives the pieces their gradients.

        ``optimizer.step()`` does so if the loop has not.  All ranks call it together, once, after the last backward.
        Returns the step's numbers; ``grad_norm`` is the norm before clipping.

        Args:
            clip: the largest global norm of this step, instead of the engine's.

        Raises:
            ValueError: no backward before it, a second call in one step, ranks at different positions in the run.
            FloatingPointError: a loss or gradient that is not finite, on any rank (see ``nonfinite``).
        """
        check_limit(clip)
        return self._reduce(self.clip if clip is None else clip)

    def _reduce(self, clip: float | None, *, updates: bool = False) -> StepResult:
        if (now := self._open) is None or not now.losses:
            raise ValueError("engine.reduce() or optimizer.step() without a backward before it: there is no gradient")
        if now.reduced:
            raise ValueError("engine.reduce a second time in one step: call it once, after the last backward")
        if self.placed.time_axis is not None:
            self.placed.time_axis.check_asked()
        self._tell("reducing")
        now.reduced = True
        try:
            position = position_of(self.steps, self._discarded, self.optimizers)
            self.last = self.reducer.finish(now, self.steps, position, clip, self._tell, updates=updates)
        except BaseException:
            self._close()  # the sums are used up
            raise
        return self.last

    def publish(self) -> None:
        """Sends the new values to where the row keeps them, and ends the step.

        The hook of the last optimizer does so; only a loop without hooked optimizers calls it, after its update.

        Raises:
            ValueError: no reduced gradients before it.
        """
        if self._open is None or not self._open.reduced:
            raise ValueError("engine.publish() without engine.reduce() before it: no step is under way")
        self.placed.publish()
        for piece in self.placed.owned:
            if piece.view.grad is not piece.gradient:  # a copy; a view of the accumulator stays readable
                piece.view.grad = None
        self._close()
        self.steps += 1
        self._tell("updated")

    def before_update(self, optimizer: Optimizer) -> None:
        """Runs before an optimizer's step."""
        if self._blocks:
            raise ValueError("optimizer.step() inside of `with engine.gathered()` or an average: leave the block first")
        if optimizer in self._stepped:
            self._check_all_stepped()
        if self._open is None or not self._open.reduced:
            self._reduce(self.clip, updates=True)
        self._tell("stepping")
        self.comm.wait_for_readers()  # a program may have read parameters since the ranks agreed

    def after_update(self, optimizer: Optimizer) -> None:
        """Runs after an optimizer's step."""
        self._tell("stepped")
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self.optimizers):
            self.publish()
        else:
            self.comm.wrote_common()

    def discard(self) -> None:
        """Throws away the sums of the step under way; does nothing before a forward or after an update.

        ``optimizer.zero_grad()`` calls it.
        """
        if self._open is None or self._stepped:
            return
        forwards = 0 if self._open.losses else self._forwards  # of forwards that have drawn their masks
        self._throw_away(had_gradients=bool(self._open.losses))
        self._forwards = forwards

    def _throw_away(self, *, had_gradients: bool) -> None:
        self._discarded += had_gradients  # the ranks compare it
        self._close()
        self._tell("discarded")

    def _close(self) -> None:
        self._open, self._forwards = None, 0
        self._stepped.clear()

    def _begin_step(self) -> OpenStep:
        if self._open is None:
            for stage in self.placed.stages.values():
                stage.begin_sums()
            self.comm.begin_step(self.steps)
            self._open = OpenStep(own_loop=True)
            self._tell("begun")
        return self._open

    def _tell(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher(event, self)

    # ---- forwards of a program's own loop ---------------------------------------------------------------------------

    def _before_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Sets the position of this forward in the run, on which dropout depends; a hook of the whole model."""
        self._check_all_stepped()  # otherwise some parameters would be new and others old, depending on the row
        if self._gathers:
            self.comm.wrote_common(later=True)  # a program may have written to this rank's pieces
        now = self._open
        if (now is not None and now.count is not None and not now.reduced) or self.placed.num_stages > 1:
            return  # engine.step has set the position
        stage = self.placed.stages[0]
        if torch.is_grad_enabled():
            stage.look_at_model()
        if not self.model.training:
            return  # no random numbers are drawn
        size = samples_of((args, kwargs))
        lengths = token_counts((args, kwargs), size)
        place, ranks = self.comm.data_rank, self.comm.mesh.data_size
        # numbered as if all ranks had equally many samples, so that ranks with fewer do not overlap
        here = (size * ranks << 80) + place * size
        if not torch.is_grad_enabled():
            stage.begin_alone(RNGPosition(self.steps, -1 - place, here, size, lengths))
            return
        self._begin_step()
        first = here + (self._forwards << 40)  # the number of microbatches is not known yet: number them apart
        microbatch = place + self._forwards * ranks
        stage.begin_alone(RNGPosition(self.steps, microbatch, first, size, lengths), self._forwards)
        self._forwards += 1

    def _after_forward(self, *_: Any) -> None:
        """Lets the program write to this rank's pieces after a forward that only reads; a hook of the whole model."""
        if not torch.is_grad_enabled() and self.placed.stages[0].unsharding.phase != EVALUATE and self._gathers:
            self.comm.wait_for_readers()

    @property
    def in_own_loop(self) -> bool:
        """True while a step of the program's own loop is under way, rather than one of ``engine.step``."""
        return self._open is not None and self._open.own_loop

    @property
    def _gathers(self) -> bool:
        """True if a forward gathers anything; inside ``engine.gathered()`` ranks may run different numbers."""
        return any(unit.split and not unit.pins for unit in self.placed.units)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _functions(self) -> tuple[LossFn, CountFn]:
        if self.loss_fn is None or self.count_fn is None:
            own = "" if self.comm.mesh.pipe > 1 else ", or use engine.backward in your own loop"
            raise ValueError(f"engine.step and engine.evaluate need loss_fn and count_fn: give them to Engine{own}")
        if self._broken or self._evaluator.broken:
            raise ValueError(
                "the last step failed inside a pipeline, and its messages may still be under way: build the "
                "world and the engine anew, and load the last state"
            )
        return self.loss_fn, self.count_fn

    def _check_all_stepped(self) -> None:
        if self._stepped:
            late = " and ".join(type(one).__name__ for one in self.optimizers if one not in self._stepped)
            raise ValueError(f"{late} has not stepped since the last backward: call step() of every optimizer once")

    def _check_optimizers(self) -> None:
        """Raises ValueError if gradients would change nothing, or dropout masks would be drawn a second time."""
        self._check_all_stepped()
        if self.placed.owned_optimizer is not None:
            self.placed.owned_optimizer.check_groups()
        if not self.steps and any(map(has_stepped, self.optimizers)):
            raise ValueError(
                "the optimizer comes from an earlier run, and the engine begins at step 0, whose dropout masks that "
                "run has used: call engine.load_step_state(saved), saved by engine.step_state() with the rest"
            )
        if not (self.optimizers or self._gave_pieces or self.listener) and self.placed.exchange.names:
            raise ValueError(
                "the engine has no optimizer, so no step would change anything: give Engine(optimizer=...), or, where "
                "it is built after the engine, call engine.use(optimizer) before the first step"
            )

    def check_between_steps(self, what: str) -> None:
        """Raises ValueError in the middle of a step, or inside of a block that has other values in the model."""
        self.reducer.settle()
        if self._open is not None or self._blocks or self._broken:
            raise ValueError(
                f"{what} in the middle of a step, or of one that failed, or inside of engine.gathered() or an average: "
                f"call it after optimizer.step() or zero_grad(), outside of such blocks"
            )

    # ---- evaluation and numbers besides the loss --------------------------------------------------------------------

    def evaluate(self, microbatches: Iterable[Any]) -> Evaluation:
        """Returns the mean loss of all ranks' microbatches, in eval mode; training continues as if it had not happened.

        Every rank passes equally many, empty ones included.  Under a pipeline a rank keeps the tensors that it sends
        until the end of the call, so pass about as many at once as in a step.

        Raises:
            ValueError: as ``step``; between a forward and the ``optimizer.step()`` of a program's own loop.
        """
        loss_fn, count_fn = self._functions()
        if self._open is not None and (self._open.count is None or self._open.reduced):
            raise ValueError("engine.evaluate in the middle of a step: call it after optimizer.step() or zero_grad()")
        for stage in self.placed.stages.values():
            stage.look_at_model()
        return self._evaluator.evaluate(microbatches, loss_fn, count_fn)

    def sum(self, value: Any) -> Any:
        """Adds up a number, a tensor, or each entry of a dict of these over all data ranks; every rank gets the sum.

        All ranks call it together, with the same names and shapes.  Under a pipeline only the values of ranks with the
        last stage count; the others may pass None.  Integers and booleans are added as int64, numbers as fp64, tensors
        in fp32 at least; they are added in the order of ranks.  Without a pipeline a tensor may be differentiated, as a
        part of every rank's loss: its gradient is the sum of theirs.

        Raises:
            ValueError: a value of another type, or different ones on different ranks.
        """
        return sum_over_ranks(self.comm, self.placed.exchange.losses_at, value)

    def gather(self, rows: Tensor | None) -> Tensor:
        """Joins the rows of all data ranks, of any number each, end to end by data rank; every rank gets them.

        All ranks call it together; under a pipeline those without the last stage may pass None.  Without a pipeline,
        rows may be differentiated, as a part of every rank's loss: each rank's rows get the sum of all gradients.

        Raises:
            ValueError: no rows, or other dtypes or shapes on other ranks.
        """
        return gathered_rows(self.comm, self.placed.exchange.losses_at, rows)

    # ---- whole parameters -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *names: str, modify: bool = False) -> Iterator[None]:
        """Makes parameters whole inside, under any row; all ranks enter and leave together.

        Under a row in 16 bits they have that dtype; if the tensor axis cuts a parameter, it is this rank's piece.  A
        penalty computed from them belongs between a forward and its backward, and keeps them whole until the step ends.

        Args:
            names: names of parameters, or of modules for all of their parameters; none: all.
            modify: they may be written to, between steps, in the same way on every rank.

        Raises:
            ValueError: unknown names; a pipeline; ``modify`` in the middle of a step; at the end of the block,
                parameters that were written to without ``modify``, or differently on different ranks.
        """
        if self.placed.num_stages > 1:
            raise ValueError("engine.gathered is for one stage: under a pipeline use engine.full_state_dict()")
        if modify and self._open is not None:
            raise ValueError(
                "engine.gathered(modify=True) in the middle of a step: call it after optimizer.step() or zero_grad()"
            )
        units = units_of(self.placed.units, names, self.placed.directory.aliases)
        self._blocks += 1
        self.placed.modified += modify
        try:
            with gathered(self.placed.stages[0].unsharding, units, self.comm, modify=modify):
                yield
        finally:
            self._blocks -= 1

    @contextmanager
    def swapped(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Gives every owned run other values inside (those of ``ema``), on all ranks, and restores its own afterwards.

        Raises:
            ValueError: in the middle of a step, or of another such block.
        """
        if self._open is not None or self._blocks:
            raise ValueError(
                "an average read in the middle of a step, which a forward with gradients begins, or inside of another "
                "block: do it after optimizer.step() or zero_grad(), and outside of engine.gathered()"
            )
        self._blocks += 1
        try:
            self.placed.exchange_values(others)
            yield
        finally:
            self.placed.exchange_values(others)
            self._blocks -= 1

    # ---- state of a run ---------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns every parameter whole and every buffer (data rank 0's), by the model's own names, on all ranks' CPUs.

        All ranks call it together; one unit is gathered at a time.
        """
        self.comm.wrote_common(later=True)  # a program may have written to its pieces
        return full_state_dict(self.placed.directory, self.placed.parts(), self.comm)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the values of whole tensors; each rank copies its pieces.

        Raises:
            ValueError: missing or surplus names, or shapes that differ; inside of ``with engine.gathered():``.
        """
        self.placed.put_away("engine.load_full_state_dict")
        load_full_state_dict(self.placed.directory, self.placed.parts(), state)

    def load_weights(self, weights: Weights) -> None:
        """Takes the values of parameters and buffers from a source that has all of them; nothing is sent."""
        self.placed.put_away("engine.load_weights")
        load_weights(self.placed.directory, self.placed.parts(), weights)

    def optimizer_state_dict(self, *, elements: bool = True) -> dict[str, Any]:
        """Returns the state of all optimizers, whole and by parameter names, on the CPU of every rank.

        It has the form of torch's ``get_optimizer_state_dict``: ``{"state": {name: {key: value}}, "param_groups":
        [{"params": [names], "lr": ...}]}``.  All ranks call it together.

        Args:
            elements: with False, values per element of a parameter are left out: empty tensors on meta
                describe them, and ``placed.pieces`` has them region by region.

        Raises:
            ValueError: no optimizer; a state that is neither a number nor shaped like its parameter.
        """
        return self.placed.needed_optimizer_state().by_name(elements=elements)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state that was saved under any layout, or by plain torch, including the groups' options.

        Nothing is sent, and only this rank's part is read, so values may be read from a file: they only need a
        ``shape`` and ``value[slices]``.  With one optimizer it may be plain torch's ``optimizer.state_dict()``.

        Raises:
            ValueError: no optimizer, groups of other parameters, a state that the row cannot cut.
        """
        self.placed.needed_optimizer_state().load(state)

    def step_state(self) -> dict[str, Any]:
        """The other state that a resumed run needs, the same on all ranks: the number of steps made (on which dropout
        depends), the seed, and the loss scale."""
        scale = self.reducer.loss_scale
        return {"step": self.steps, "seed": self.seed, "loss_scale": None if scale is None else asdict(scale)}

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Continues where a run was saved.

        Raises:
            ValueError: another seed, or a loss scale where there is none (or none where there is one).
        """
        self.check_step_state(state)
        self.steps = state["step"]
        if state["loss_scale"] is not None:
            self.reducer.loss_scale = LossScale(**state["loss_scale"])

    def check_step_state(self, state: Mapping[str, Any]) -> None:
        """Raises the errors that ``load_step_state`` would raise."""
        mine = self.step_state()
        if state["seed"] != mine["seed"]:
            raise ValueError(f"saved with seed {state['seed']}, and the engine has seed {mine['seed']}: give it that")
        if (state["loss_scale"] is None) != (mine["loss_scale"] is None):
            raise ValueError(f"saved with loss scale {state['loss_scale']}, and the engine has {mine['loss_scale']}")
