"""Decides when units are unsharded and resharded.

Every unit that reads split parameters has hooks on its module: they call ``unshard`` before the parameters are read and
``reshard`` afterwards.  The *prefetch* gathers the next unit while this one computes.  Backward does the same from the
other end, and gathers the units again that the row has resharded.

A schedule may *hold* a whole stage unsharded over several passes, and a program may *pin* units to read parameters by
itself (``program_reads``).  The hooks then find everything gathered.

Gathers follow the order in which the program runs its units, which is the same on all ranks.  If a pass repeats the
last one of its kind, at most 1 + prefetch units are unsharded, besides those that something else keeps open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.context import CurrentForward, RunningUnit, goes_on, in_backward
from plait.forward.parameter import AtRest
from plait.forward.stays import StaysHere
from plait.torch_private import DisableTorchFunction, are_functorch_transforms_active, tree_map
from plait.zero.activation_hooks import ActivationHooks, tensors_in
from plait.zero.program_reads import ProgramReads
from plait.zero.unit import GatherOrder, OpenUnits, State, Unit

EVALUATE = "evaluate"
"""Ledger phase of an evaluation, which has its own order of gathers."""


class Unsharding(StaysHere):
    """Decides when the units of one stage, in the order of ``named_modules``, are gathered and freed.

    Args:
        model: the stage's module; only hooks are added to it.
        prefetch: the number of units that may be gathered ahead of the running one.
        current: knows the running microbatch, and receives the running unit.
        before_root: called with the model's arguments before each forward of the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        prefetch: int,
        current: CurrentForward,
        before_root: Callable[[Sequence[Any], dict[str, Any]], None],
    ) -> None:
        self.units, self.prefetch, self.current = list(units), prefetch, current
        self.orders = {phase: GatherOrder() for phase in ("forward", "backward", EVALUATE)}
        self.phase = "forward"
        """The ledger phase of the forwards that follow."""
        self.num_flying = 0
        """The number of a schedule's microbatches between their forward and the end of their backward."""
        self.held = False
        """True while the schedule keeps the whole stage unsharded."""
        self.in_pass = False
        """True while a backward of the engine runs; other backwards are a program's own (``torch.autograd.grad``)."""
        self.split_backward = False
        """True if the running pass leaves weight gradients to a separate pass, after the units have been resharded."""
        self.open_units = OpenUnits()
        self.runs: Counter[Unit] = Counter()
        """Forwards of each gathered unit in the last ``engine.step``, in order, without recomputations."""
        self.found: set[Unit] = set()
        """Units read in the last ``engine.step`` by a backward of the program, or first by an enclosing unit."""
        self.program_reads = ProgramReads(self)
        self._inside: list[Unit] = []
        """The units whose forward is under way, innermost last."""
        self.backward_open: dict[Unit, None] = {}
        """The units whose backward is under way."""
        self._ran_backward, self._has_gradients = set[Unit](), set[Unit]()
        self._hooks, self._before_root = ActivationHooks(), before_root
        self._running: dict[Unit, RunningUnit] = {}
        for unit in units:
            unit.open_units = self.open_units
            self._running[unit] = RunningUnit(partial(self._begin_backward_of, unit), partial(self._reads, unit))
            if unit.split_needs or (unit.module is model and any(other.split for other in units)):
                # hooks on the user's modules: docs/guide/your-own-loop.md
                # before the user's pre-hooks, which may read parameters (weight_norm); the other hook is after theirs
                before = partial(self._before_forward, unit)
                unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                unit.module.register_forward_hook(self._after_forward)
        model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True)

    # ---- unshard and reshard ------------------------------------------------------------------------------------

    def unshard(self, unit: Unit, phase: str) -> None:
        """Gathers the parameters that a unit reads, waits for them, then starts to gather the units that come next."""
        order = self.orders.get(phase)
        for needed in unit.needs:
            self._unshard_one(needed, phase)
        if order is None or are_functorch_transforms_active():  # a transform would see the values arrive
            return
        ahead = 0
        for one in self.open_units.units:
            ahead += one.state is State.UNSHARDING and not one.users
        for place in range(len(order.seen), len(order.expected)):
            if ahead >= self.prefetch:
                break
            if (coming := order.expected[place]).state is State.SHARDED:
                coming.unshard(phase, self.current.context.microbatch)
                ahead += 1

    def _unshard_one(self, unit: Unit, phase: str) -> None:
        unit.users += 1
        if unit.split and (unit.users == 1 or unit.state is not State.UNSHARDED):
            if phase in self.orders and not unit.pins:  # ranks may run pinned units different numbers of times
                self.orders[phase].record(unit)
            if unit.state is State.SHARDED:
                unit.unshard(phase, self.current.context.microbatch)
            if unit.state is State.UNSHARDING:
                unit.wait()

    def _reads(self, unit: Unit, parameter: Tensor) -> None:
        """Lets a unit borrow a parameter of another unit that its forward reads, from now on whenever it runs.

        While the schedule holds the stage nothing is at rest, but the unit's backward may be the first to read it.
        """
        if not self.held and not isinstance(parameter, AtRest):
            return
        owner = next(u for u in self.units for flat in u.flats if any(p is parameter for p in flat.parameters))
        if owner in unit.needs or (owner in unit.ancestors and owner.state is not State.SHARDED):
            return
        self._check_seen(unit, [owner])
        with DisableTorchFunction():
            unit.borrow(owner)
            if unit in owner.ancestors:
                self.found.add(owner)
            self._unshard_one(owner, self.phase)

    def reshard(self, unit: Unit, *, keep: bool, keep_borrowed: bool) -> None:
        """Ends a unit's reading of its parameters, for now.

        Args:
            keep: the unit's backward follows: keep the row's part from forward to backward.
            keep_borrowed: a backward of the borrowed parameters' owners follows.
        """
        for needed in unit.needs:
            needed.users -= 1
            if needed.users == 0 and needed.split:
                if needed.keeps_open and (keep or (keep_borrowed and needed is not unit)):
                    needed.awaits_backward = True
                    continue
                if keep:
                    needed.keep()
                if not needed.pins:
                    needed.reshard()

    # ---- forward ------------------------------------------------------------------------------------------------

    def begin_forward(self, microbatch: int, *, split: bool = False) -> None:
        """Begins the forward of a microbatch of a step; ``split``: its backward comes in two parts."""
        self._hooks.microbatch = microbatch
        self.split_backward = split
        self.num_flying += 1

    def _before_model(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            if not self.held:
                self._recover()
            self._before_root(args, kwargs)
            self.orders[self.phase].begin()

    def hold(self, held: bool) -> None:
        """Notes that the schedule keeps the whole stage unsharded from now on, or no longer does."""
        self.held = held

    def drop_step(self) -> None:
        """Drops everything that remains of a step: all its backwards are over, or will not come."""
        self.held = False
        self.num_flying = 0
        self.program_reads.end_step()
        self._recover()
        self._hooks.drop()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Runs forwards inside without a backward, and without changing the order of the step's gathers."""
        self.drop_step()
        self.phase = EVALUATE
        try:
            yield
        finally:
            self.phase = "forward"

    def _recover(self) -> None:
        """Reshards units that a forward or backward left open when it raised."""
        self.in_pass = self.program_reads.in_backward = False
        self.backward_open.clear()
        self._ran_backward.clear()
        self.current.replace(units=())
        self._inside.clear()
        for unit in self.units:
            if unit.users:
                unit.users = 0
                if unit in self.open_units.units and not unit.pins:
                    unit.reshard()

    def forget(self) -> None:
        """Drops everything gathered or kept, after a microbatch, or after the parameters have changed."""
        for unit in [unit for unit in self.open_units.units if not unit.pins]:
            unit.reshard()
        for unit in self.units:
            unit.forget()

    def _before_forward(self, unit: Unit, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if in_backward():
            self._begin_backward_of(unit)
            return
        if self._ended_early:
            return
        self._check_seen(unit, unit.needs)
        with DisableTorchFunction():  # the engine's own work belongs to no forward
            self.unshard(unit, self.phase)
            if torch.is_grad_enabled() and self._waits_for_inputs(unit):
                self._hooks.await_inputs(unit, (*args, *kwargs.values()), self._end_if_done)
        self.runs[unit] += self.phase == "forward"
        self.current.enter_unit(self._running[unit])
        self._inside.append(unit)

    def _check_seen(self, unit: Unit, needs: Sequence[Unit]) -> None:
        if are_functorch_transforms_active() and not all(need.pins or not need.split for need in needs):
            raise ValueError(
                f"unit {unit.name!r}, whose parameters are split, runs inside a transform of torch.func (grad, vmap, "
                f"jvp), which does not show when they are read: call it inside `with engine.gathered():`, use "
                f"torch.autograd.grad, or a row that keeps parameters whole (zero2)"
            )

    def _waits_for_inputs(self, unit: Unit) -> bool:
        return self.split_backward or not unit.done_with_gradients

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward() or self._ended_early:
            return None
        return self._leave(self._inside.pop(), output)

    @property
    def _ended_early(self) -> bool:
        """True after the last link of a stage has run: nothing more is gathered; ``unwind`` leaves the open units."""
        boundary = self.current.context.boundary
        return boundary is not None and boundary.output is not None

    def unwind(self, output: Any) -> None:
        """Leaves the units around the point where the model's forward ended early, with ``output``."""
        while self._inside:
            self._leave(self._inside.pop(), output)

    def _leave(self, unit: Unit, output: Any) -> Any:
        """Leaves a unit; returns its output with clones of the tensors that share the memory of its parameters."""
        self.current.leave_unit()
        tensors = tensors_in(output)
        if torch.is_grad_enabled() and not tensors and unit.split_needs:
            raise ValueError(
                f"unit {unit.name!r} returns {type(output).__name__}, in which no tensor is found: return "
                f"tensors, or tuples, lists, dicts or registered pytrees of them, so that its backward can be seen"
            )
        with DisableTorchFunction():
            if any(map(unit.gathers, tensors)):
                output = tree_map(lambda t: t.clone() if isinstance(t, Tensor) and unit.gathers(t) else t, output)
                tensors = tensors_in(output)
            tracked = [tensor for tensor in tensors if tensor.requires_grad]
            for tensor in tracked:
                self._hooks.when_gradient_comes(tensor, partial(self._at_output, unit))
            if torch.is_grad_enabled():
                unit.differentiated = bool(tracked)
            self.reshard(unit, keep=bool(tracked), keep_borrowed=False)
        return output

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, microbatch: int | None, *, split: bool = False) -> None:
        """Begins the backward of a microbatch; None: the last forward, in a program's own loop.

        ``split``: only the input part runs.
        """
        if microbatch is not None:
            self._hooks.microbatch = microbatch
        self.split_backward, self.in_pass = split, True
        self.orders["backward"].begin()
        self._ran_backward.clear()

    def begin_weights(self) -> None:
        """Begins the weight part of a microbatch's backward, which reads no parameter."""
        self.split_backward = True

    def _at_output(self, unit: Unit) -> None:
        """Begins a unit's backward when its output's gradient comes; a program's own backward may end there."""
        if self.in_pass or goes_on():
            self._begin_backward_of(unit)

    def _begin_backward_of(self, unit: Unit) -> None:
        if unit in self.backward_open or unit in self._ran_backward:
            return
        if self.in_pass:
            self.backward_open[unit] = None
            self.unshard(unit, "backward")
        elif unit not in self._inside:  # while its forward is under way, it is open
            self.program_reads.begin_backward_of(unit)

    def end_backwards(self, *, keep: bool) -> None:
        """Ends every unit's backward that is under way."""
        for unit in list(self.backward_open):
            self.end_backward_of(unit, keep=keep)
        self._ran_backward.clear()
        self._has_gradients.clear()

    def note_gradients(self, unit: Unit) -> None:
        """Notes that all parameters of the unit that get a gradient have it."""
        if unit.split_needs:
            self._has_gradients.add(unit)
            self._end_if_done(unit)

    def _end_if_done(self, unit: Unit) -> None:
        """Ends a unit's backward once its parameters and, if that is not enough, its inputs have their gradients."""
        if unit.trains and unit not in self._has_gradients and not self.split_backward:
            return
        if not self._waits_for_inputs(unit) or self._hooks.inputs_have_come(unit):
            self.end_backward_of(unit)

    def end_backward_of(self, unit: Unit, *, keep: bool = False) -> None:
        if unit in self.backward_open:
            del self.backward_open[unit]
            self._ran_backward.add(unit)
            self.reshard(unit, keep=keep or self.num_flying > 1, keep_borrowed=True)

    def end_backward(self) -> None:
        """Ends a microbatch's backward: reshards every unit that is still unsharded."""
        left, ran = list(self.backward_open), self._ran_backward | self.backward_open.keys()
        self.end_backwards(keep=False)
        self.current.begun = 0
        self.num_flying = max(0, self.num_flying - 1)
        for unit in self.units:
            if unit.split_needs:
                unit.differentiated, unit.stays_open = unit in ran, unit in left
            users = unit.users - self.held
            assert users == 0, f"unit {unit.name!r} still has {users} users after the backward pass"
        self.in_pass = False
        if not self.held and not self.num_flying:
            self.forget()
