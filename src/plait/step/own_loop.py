"""What a loop of one's own calls on an engine, besides ``engine.step``.

loss = loss_fn(model(x), y)
engine.backward(loss, count)             sums of gradients, as often as there are microbatches
engine.clip_grad_norm_(1.0)              the sums are finished here, or by the optimizer's pre-hook
optimizer.step()

with engine.gathered(): ...              whole parameters: penalties, averages, surgery
engine.step_state()                      what a run that goes on needs besides model and optimizer
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from plait.step.gathered import gathered, units_of
from plait.step.host_random import HostRandomness
from plait.step.metrics import gathered_rows, summed
from plait.step.placed_model import PlacedModel
from plait.step.reduction import Reduction, as_sum
from plait.step.step import OpenStep, StepResult, whole_count
from plait.step.turns import StepTurns
from plait.step.update import Update
from plait.table.precision import LossScale
from plait.zero.optim import has_stepped
from plait.zero.shown import ShownGradients
from plait.zero.state.optimizer_state import OptimizerState


class OwnLoop(PlacedModel):
    """The calls; ``Engine`` is the only one of these, and has what they need."""

    update: Update
    last: StepResult
    listener: Callable[..., None] | None
    steps: int
    _blocks: int
    """``gathered`` blocks that are open."""
    _modified: int
    """Those that there were with ``modify``."""
    _broken: bool
    """A step failed inside of a pipeline."""
    _now: OpenStep | None
    _host: HostRandomness
    _turns: StepTurns
    _shown: ShownGradients

    @abstractmethod
    def _begin_step(self) -> OpenStep: ...

    @abstractmethod
    def _prepare(self, clip: float | None) -> None: ...

    def backward(
        self,
        loss: Tensor,
        count: int | None = None,
        reduction: Reduction | None = None,
        *,
        also: Sequence[OwnLoop] = (),
        retain_graph: bool | None = None,
    ) -> None:
        """The backward of one microbatch of a user's own loop.

        Args:
            loss: of the microbatch, a scalar.
            count: how many terms the loss has; ``optimizer.step()`` divides by the global sum of the counts.
            reduction: ``"mean"``, as of ``F.cross_entropy`` and Hugging Face's models, or ``"sum"``: what the loss is
                of its terms. None: a sum, unless it can be seen that it is a mean, which is refused.
            also: other engines through whose models the loss goes. Their parameters get gradients too, which their
                optimizer's ``step()`` uses and its ``zero_grad()`` throws away.
            retain_graph: refused if true: each forward has one backward.

        Raises:
            ValueError: no count, no optimizer, a loss that is no scalar, a mean given as a sum, a negative count.
        """
        if count is None:
            raise ValueError(
                "engine.backward(loss) lacks the number of terms of the loss, by which ranks are weighed: write "
                'engine.backward(loss, count, reduction="mean"), as with count = y.numel()'
            )
        if retain_graph:
            raise ValueError(
                "retain_graph=True is for a second backward of one forward, whose gradients the engine would sum "
                "twice: add the losses up and call engine.backward once, or run the forward again"
            )
        engines = (self, *also)
        for engine in engines:
            if engine.pipeline.num_stages > 1:
                raise ValueError("engine.backward is for one stage: a pipeline's schedule decides; use engine.step")
            if also and engine.update.loss_scale is not None:
                raise ValueError(
                    "a backward of several engines, one of which scales the loss: build it without a scale"
                )
            engine._check_optimizer()
        if loss.dim() != 0:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: return the sum over the microbatch, a scalar")
        if count < 0:
            raise ValueError(f"a count of {count}: it is the number of terms of the loss, 0 or more")
        count = whole_count(count)
        loss = as_sum(loss, count, reduction, self.update.weighted)
        with ExitStack() as stack:
            for engine in engines:
                engine._host.check(alone=False)
                now = engine._begin_step()
                if now.prepared:
                    raise ValueError(
                        "engine.backward after engine.clip_grad_norm_: clip behind the last backward of the step"
                    )
                now.local_count += count
                engine._shown.check()
                engine._shown.hide()
                stack.callback(engine._show_gradients)
                if engine is not self:
                    stack.enter_context(engine.stages[0].taking_part())
            self.stages[0].backward_from(loss, self.update.scale)
        for engine in engines:
            engine._begin_step().losses.append(loss.detach())

    def _show_gradients(self) -> None:
        pieces = ((piece.name, piece.view) for piece in self.owned)
        self._shown.show(chain(self.stages[0].gradients.touched_parameters(), pieces))

    # ---- what a run leaves and takes up -----------------------------------------------------------------------------

    def optimizer_state_dict(self, *, elements: bool = True) -> dict[str, Any]:
        """The state of all optimizers, whole and by the names of the parameters, on the CPU of every rank.

        It has the form of torch's ``get_optimizer_state_dict``: ``{"state": {name: {key: value}}, "param_groups":
        [{"params": [names], "lr": ...}]}``.  All ranks call it together.

        Args:
            elements: with False, values that come one per element of a parameter are left out: empty tensors on meta
                say what they are, and ``pieces`` has them region by region.

        Raises:
            ValueError: no optimizer; a state that is no number, and has not the shape of what it belongs to.
        """
        return self._state_of_optimizer().by_name(elements=elements)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that was saved under any layout, or by plain torch, groups' options included.

        Nothing is sent, and only this rank's part is read, so values may be read from a file: all that they need is a
        ``shape`` and ``value[slices]``.  Of one optimizer it may be what ``optimizer.state_dict()`` is in plain torch.

        Raises:
            ValueError: no optimizer, groups of other parameters, a state that the row cannot cut.
        """
        self._state_of_optimizer().load(state)

    def _state_of_optimizer(self) -> OptimizerState:
        self.take_new_groups()
        if self.optimizer_state is None:
            raise ValueError("the engine has no optimizer: give Engine(optimizer=...) or call engine.use(optimizer)")
        return self.optimizer_state

    def step_state(self) -> dict[str, Any]:
        """What a run that goes on needs beside the state of model and optimizer, the same on all ranks: the number of
        steps made (on which dropout depends), the seed, and the loss scale.
        """
        scale = self.update.loss_scale
        return {"step": self.steps, "seed": self.seed, "loss_scale": None if scale is None else asdict(scale)}

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a run was saved; ValueError as ``check_step_state`` raises it."""
        self.check_step_state(state)
        self.steps = state["step"]
        if state["loss_scale"] is not None:
            self.update.loss_scale = LossScale(**state["loss_scale"])

    def check_step_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for another seed, or a loss scale where there is none (or none where there is one)."""
        mine = self.step_state()
        if state["seed"] != mine["seed"]:
            raise ValueError(f"saved with seed {state['seed']}, and the engine has seed {mine['seed']}: give it that")
        if (state["loss_scale"] is None) != (mine["loss_scale"] is None):
            raise ValueError(f"saved with loss scale {state['loss_scale']}, and the engine has {mine['loss_scale']}")

    def check_between_steps(self, what: str) -> None:
        """Raises ValueError in the middle of a step, or inside of a block that has other values in the model."""
        if self._now is not None or self._blocks or self._broken:
            raise ValueError(
                f"{what} in the middle of a step, or of one that failed, or inside of engine.gathered() or an average: "
                f"call it after optimizer.step() or zero_grad(), outside of such blocks"
            )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Finish the sums of ``backward``, and clip them by their global norm, before ``optimizer.step()``.

        All ranks call it together, once per step, in place of ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, a scalar.

        Raises:
            ValueError: no backward, a second call in one step, an engine that clips by itself.
        """
        if self.update.clip is not None:
            raise ValueError(
                f"engine.clip_grad_norm_ on an engine with clip={self.update.clip}: leave one of them out (the norm is "
                f"engine.last.grad_norm)"
            )
        if self._now is not None and self._now.prepared:
            raise ValueError("engine.clip_grad_norm_ a second time in one step: call it once, behind the last backward")
        self._prepare(max_norm)
        norm = self.last.grad_norm  # None where the step is not made
        return torch.tensor(math.inf if norm is None else norm, dtype=self.norm.dtype)

    @contextmanager
    def gathered(self, *names: str, modify: bool = False) -> Iterator[None]:
        """Parameters are whole inside, whatever the row; all ranks enter and leave together.

        Under a row in 16 bits they have that dtype; of one that is cut over the tensor axis this rank's piece is there.
        A penalty made of them belongs between a forward and its backward, and keeps them whole until that is over.

        Args:
            names: of parameters, or of modules for all of theirs; none: all.
            modify: they may be written to, between steps, on every rank the same.

        Raises:
            ValueError: unknown names; a pipeline; ``modify`` in the middle of a step; and behind the block, parameters
                that were written to without ``modify``, or differently on different ranks.
        """
        if self.pipeline.num_stages > 1:
            raise ValueError("engine.gathered is for one stage: under a pipeline use engine.full_state_dict()")
        if modify and self._now is not None:
            raise ValueError(
                "engine.gathered(modify=True) in the middle of a step: call it after optimizer.step() or zero_grad()"
            )
        units = units_of(self.units, names, self.directory.aliases)
        self.take_over()
        self._blocks += 1
        self._modified += modify
        try:
            with gathered(self.stages[0].unsharding, units, self.comm, modify=modify):
                yield
        finally:
            self._blocks -= 1

    @contextmanager
    def swapped(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Every owned run has other values inside (``ema`` holds them), on all ranks, and its own again afterwards.

        Raises:
            ValueError: in the middle of a step, or of another such block.
        """
        if self._now is not None or self._blocks:
            raise ValueError(
                "an average read in the middle of a step, which a forward with gradients begins, or inside of another "
                "block: do it after optimizer.step() or zero_grad(), and outside of engine.gathered()"
            )
        self._blocks += 1
        try:
            self._exchange_values(others)
            yield
        finally:
            self._exchange_values(others)
            self._blocks -= 1

    @torch.no_grad()
    def _exchange_values(self, others: Sequence[Tensor]) -> None:
        self.take_over()
        self.unpin()
        self.comm.wait_for_readers()
        for piece, other in zip(self.owned, others, strict=True):
            before = piece.view.clone()
            piece.view.copy_(other)
            other.copy_(before)
        self.publish()

    # ---- beside the loss --------------------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """The sum over all data ranks of a number, a tensor, or each entry of a dict of these, on every rank.

        All ranks call it together, with the same names and shapes.  Under a pipeline only what ranks with the last
        stage bring counts; the others may bring None.  Integers and booleans are summed as int64, numbers as fp64,
        tensors in fp32 at least; the additions go by rank.  Without a pipeline a tensor may be differentiated, as a
        part of every rank's loss: its gradient is the sum of theirs.

        Raises:
            ValueError: something else, or different things on different ranks.
        """
        return summed(self.comm, self.exchange.losses_at, value)

    def gather(self, rows: Tensor | None) -> Tensor:
        """The rows of all data ranks, of any number each, end to end by data rank, on every rank.

        All ranks call it together; under a pipeline those without the last stage may bring None.  Without one, rows
        may be differentiated, as a part of every rank's loss: each rank's get the sum of all gradients.

        Raises:
            ValueError: no rows, or other dtypes or shapes on other ranks.
        """
        return gathered_rows(self.comm, self.exchange.losses_at, rows)

    def _check_optimizer(self) -> None:
        """Raises ValueError where gradients would be made that nobody gets, or masks drawn for a second time."""
        self._turns.check_all(self.optimizers)
        self.take_new_groups()
        if not self.steps and any(map(has_stepped, self.optimizers)):
            raise ValueError(
                "the optimizer comes from an earlier run, and the engine begins at step 0, whose dropout masks that "
                "run has used: call engine.load_step_state(saved), saved by engine.step_state() with the rest"
            )
        if not self.optimizers and self.listener is None and self.exchange.names:
            raise ValueError(
                "the engine has no optimizer, so no step would change anything: give Engine(optimizer=...), or, where "
                "it is built after the engine, call engine.use(optimizer) before the first step"
            )
