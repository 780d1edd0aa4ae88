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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from plait.comm import Comm
from plait.core.actions import Action, Kind
from plait.core.cells import Strategy, find_strategy
from plait.core.collectives import Note
from plait.core.flat import Cut, UnitLayout
from plait.core.orders import one_stage
from plait.engine.build import build_units
from plait.engine.exchange import Exchange
from plait.engine.gradients import Gradients, owned, parameters_of
from plait.engine.guard import ModelGuard
from plait.engine.optim import Owned, OwnedOptimizer, clip_factor, owned_runs, square_sum
from plait.engine.rng import Draw, Streams
from plait.engine.runtime import execute
from plait.engine.stage import Stage
from plait.engine.unit import Unit

LossFn = Callable[[nn.Module, Any], Tensor]
CountFn = Callable[[Any], int]
Listener = Callable[[str, "Engine"], None]


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    ``loss`` is the global sum over the global count; ``local_losses`` are this rank's sums, one per microbatch.
    ``grad_norm`` is the global norm before clipping, None where no clipping was asked for.
    """

    step: int
    loss: float
    count: int
    local_losses: tuple[float, ...]
    grad_norm: float | None


def num_samples(batch: Any) -> int:
    """The size of the first dim of the first tensor in a batch."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    raise ValueError(f"no tensor found in the batch of type {type(batch).__name__}: its first dim tells the number of samples")


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
        listener: Listener | None = None,
    ) -> None:
        self.model, self.comm, self.strategy = model, comm, find_strategy(strategy)
        self.loss_fn, self.count_fn = loss_fn, count_fn
        self.clip, self.listener, self.seed = clip, listener, seed
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: it is a number of units, from 0")
        names = {id(p): n for n, p in model.named_parameters()}
        self.units: list[Unit] = build_units(model, comm, self.strategy, names=units, cut=cut, seed=seed)
        self.streams = Streams(seed)
        self.stage = Stage(model, self.units, prefetch, self.streams, self._before_forward)
        self.gradients = Gradients(self.stage, comm)
        self.exchange = Exchange(comm, [n for n, _, flat, _ in parameters_of(self.units) if flat.trainable])
        self.guard = ModelGuard(model)
        self.steps = 0
        self.optimizer = optimizer
        self.owned: list[Owned] = []
        flat_gradients = [g for unit in self.gradients.order for g in self.gradients.flats[unit]]
        if optimizer is None:
            self.owned = owned_runs(flat_gradients)
        else:
            cuts = cut == "element" and comm.mesh.count(self.strategy.optim.split) > 1
            self.pieces = OwnedOptimizer(optimizer, names, flat_gradients, cuts=cuts)
            self.owned = self.pieces.owned
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda *_: self._after_update())
        self.have_gradient: dict[str, bool] = {}
        """Which parameters got a gradient on any rank in the last step."""
        self._open = False
        self._reduced = False
        self._losses: list[Tensor] = []
        self._local_count = 0
        self._count = 0
        self._forwards = 0
        self._draw: Draw | None = None
        self._norm: float | None = None
        self._loss = 0.0

    # ---- the primitive ------------------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[Any]) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank brings equally many.

        Raises:
            ValueError: no microbatch, ranks that disagree on their number, nothing to count, no loss function.
        """
        if self.loss_fn is None or self.count_fn is None:
            raise ValueError("engine.step needs loss_fn and count_fn: give them to Engine, or drive your own loop with engine.backward")
        schedule = one_stage(len(microbatches))
        counts = [self.count_fn(batch) for batch in microbatches]
        samples = [num_samples(batch) for batch in microbatches]
        first, self._count = self.exchange.counts(len(microbatches), sum(counts), sum(samples))
        self._begin_step()
        starts = [first + sum(samples[:m]) for m in range(len(samples))]
        losses: dict[int, Tensor] = {}

        def forward(action: Action) -> None:
            m = action.microbatch
            place = self.comm.mesh.data_rank(self.comm.rank) * len(microbatches) + m
            self._draw = Draw(self.steps, place, starts[m], samples[m])
            self.stage.microbatch = m
            assert self.loss_fn is not None
            losses[m] = self.loss_fn(self.model, microbatches[m])

        def backward(action: Action) -> None:
            m = action.microbatch
            self._backward(losses[m], 1 / self._count, last=m == len(microbatches) - 1)
            self._losses.append(losses.pop(m).detach())

        def update(action: Action) -> None:
            if self.optimizer is not None:
                self.optimizer.step()
            else:
                self._before_update()
                self._after_update()

        handlers: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: backward,
            Kind.REDUCE: lambda action: self._reduce(),
            Kind.UPDATE: update,
        }
        execute(schedule[0], handlers)
        return StepResult(self.steps - 1, self._loss, self._count, tuple(self._local), self._norm)

    # ---- the thin face for a loop of one's own ------------------------------------------------------------------

    def backward(self, loss: Tensor, count: int) -> None:
        """The backward of one microbatch of a user's own loop.

        Args:
            loss: the *sum* of the microbatch's losses.
            count: how many terms it has. ``optimizer.step()`` divides by the global sum of the counts.
        """
        self._begin_step()
        self._local_count += count
        self._backward(loss, 1.0, last=False)
        self._losses.append(loss.detach())

    @property
    def last(self) -> StepResult:
        """What the last step of a user's own loop did."""
        return StepResult(self.steps - 1, self._loss, self._count, tuple(self._local), self._norm)

    # ---- parts of a step ----------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._open:
            return
        self.guard.check()
        self.gradients.begin_step()
        self._open, self._reduced = True, False
        self._losses, self._local_count, self._forwards = [], 0, 0

    def _before_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Hook of the whole model: where in the run this forward stands, for the dropout streams."""
        if not self.model.training or not torch.is_grad_enabled():
            return
        draw, self._draw = self._draw, None
        if draw is None:
            self._begin_step()
            size = num_samples((args, kwargs))
            place = self.comm.mesh.data_rank(self.comm.rank)
            ahead = self._forwards * self.comm.mesh.data_size
            draw = Draw(self.steps, place + ahead, (place + ahead) * size, size)
            self.stage.microbatch = self._forwards
            self._forwards += 1
        self.streams.begin(draw)

    def _backward(self, loss: Tensor, scale: float, *, last: bool) -> None:
        if loss.dim() != 0:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: return the sum over the microbatch, a scalar")
        self.stage.begin_backward()
        self.gradients.begin_microbatch(last=last)
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward(torch.full_like(loss, scale))
        self.gradients.end_microbatch()
        self.stage.end_backward()

    def _reduce(self) -> None:
        if not self._reduced:
            self.gradients.reduce()
            self._reduced = True

    def _before_update(self) -> None:
        """Hook before ``optimizer.step``: finish the sums, divide (own loops only), clip, hand gradients over."""
        if not self._open:
            raise ValueError("optimizer.step() without a backward before it: there is no gradient")
        if self._local_count or not self._losses:
            _, self._count = self.exchange.counts(len(self._losses), self._local_count, 0)
            with torch.no_grad():
                self.gradients.reduce()
                for piece in self._pieces():
                    piece.mul_(1 / self._count)
        self._reduce()
        local = [loss.item() for loss in self._losses]
        touched = {
            g.flat.layout.slots[i].name for gs in self.gradients.flats.values() for g in gs for i in g.touched
        }
        squares = square_sum(o.gradient for o in self.owned) if self.counts_norm() else 0.0
        total, losses, self.have_gradient = self.exchange.report(squares, local, touched)
        if self.listener:
            self.listener("reduced", self)
        self._local, self._loss = local, math.fsum(losses) / self._count
        self._norm = None
        if self.clip is not None:
            self._norm = self._rounded(math.sqrt(total))
            factor = clip_factor(self._norm, self.clip)
            if factor < 1:
                with torch.no_grad():
                    for piece in self._pieces():
                        piece.mul_(factor)
        if self.optimizer is not None:
            self.pieces.give_gradients(self.have_gradient)

    def _pieces(self) -> list[Tensor]:
        return [piece for gs in self.gradients.flats.values() for _, piece in owned(gs)]

    def counts_norm(self) -> bool:
        """Whether this rank adds its squares to the norm: of ranks that hold the same piece, the first one does."""
        if self.clip is None:
            return False
        here = self.comm.mesh.coordinates(self.comm.rank)
        return all(here[a] == 0 for a in ("replica", "shard") if a not in self.strategy.optim.split)

    def _rounded(self, norm: float) -> float:
        """The norm, summed in fp64, rounded once to the gradients' precision (fp32 at least)."""
        wide = any(o.gradient.dtype == torch.float64 for o in self.owned)
        return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32).item()

    def _after_update(self) -> None:
        """Hook after ``optimizer.step``: bring the new values to where the row keeps them."""
        for unit in self.units:
            unit.publish()
        for piece in self.owned:
            piece.view.grad = None
        self._open = False
        self.steps += 1
        if self.listener:
            self.listener("updated", self)

    _local: Sequence[float] = ()

    # ---- state --------------------------------------------------------------------------------------------------

    def layouts(self) -> tuple[UnitLayout, ...]:
        """The units as the planner sees them."""
        borrowed = [u for unit in self.units for u in unit.needs if u is not unit]
        return tuple(unit.layout(1 + sum(b is unit for b in borrowed)) for unit in self.units if unit.flats)

    def bytes_held(self) -> dict[str, int]:
        """Bytes on this rank between steps, by kind of state, and the peak of gathered parameters."""
        flats = [flat for unit in self.units for flat in unit.flats]
        return {
            "params": sum(f.rest.numel() * f.rest.element_size() for f in flats),
            "grads": sum(
                g.accumulated.numel() * g.accumulated.element_size() for gs in self.gradients.flats.values() for g in gs
            ),
            "optimizer": self.pieces.state_bytes() if self.optimizer is not None else 0,
            "gathered_peak": self.stage.peak_bytes,
            "gradient_buffers": self.gradients.buffers.bytes,
        }

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter whole and every buffer (data rank 0's), by the model's own names, on the CPU of every rank.

        All ranks call it together; one unit is gathered at a time.
        """
        whole: dict[int, Tensor] = {}
        for unit in self.units:
            unit.gather("state", -1)
            unit.show()
            for _, parameter, _, _ in parameters_of([unit]):
                whole[id(parameter)] = parameter.detach().to("cpu", copy=True)
            if unit.split and not unit.users:
                unit.free()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        state = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name in parameters:
                state[name] = whole[id(parameters[name])]
            else:
                buffer = value.detach().reshape(-1).clone()
                self.comm.broadcast(buffer, ("replica", "shard"), 0, note=Note("state", name)).wait()
                state[name] = buffer.view(value.shape).cpu()
        return state

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of whole tensors; each rank copies its pieces.

        Raises:
            ValueError: missing or surplus names, or shapes that differ.
        """
        own = self.model.state_dict(keep_vars=True)
        if own.keys() != state.keys():
            missing, surplus = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(f"the state has missing names {missing[:3]} and surplus names {surplus[:3]}")
        place = {id(p): (flat, index) for _, p, flat, index in parameters_of(self.units)}
        for unit in self.units:
            unit.settle()
        for name, value in own.items():
            if value.shape != state[name].shape:
                raise ValueError(f"{name!r} has shape {tuple(value.shape)}, the state's has {tuple(state[name].shape)}")
            if id(value) in place:
                flat, index = place[id(value)]
                flat.write(index, state[name].to(value.dtype))
            else:
                value.copy_(state[name])
