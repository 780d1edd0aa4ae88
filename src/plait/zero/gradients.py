"""Brings every gradient to its owner.

Autograd delivers a parameter's gradient once per backward.  A hook moves it into the unit's flat gradient buffer (see
``flat_gradient``).  After the last gradient of a unit the row's ``microbatch`` moves start.

If a microbatch sends nothing, a parameter whose sum has begun needs no hook, so the hook sleeps: ``p.grad`` is the
sum during the backward, and autograd adds to it, as in plain PyTorch.  A Python call costs more than most sums.

In ``engine.step`` the *step's* moves (none under zero3) start as soon as a unit's last backward is over, if messages
travel during computation or microbatches send messages anyway.  Otherwise, and in own loops, all start at the end.

*Order.*  Where parameters are split, every rank runs the same units in the same order (or their gathers would not
match), so a microbatch's reductions start as units arrive.  All other reductions start in one fixed order, last unit
first; a unit that did not run on this rank still takes part, with zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from plait.comm import Comm
from plait.table.cells import Move
from plait.table.collectives import Note
from plait.table.flat import lower
from plait.torch_private import DisableTorchFunctionSubclass, will_engine_execute_node
from plait.zero.adopted import gradient_of
from plait.zero.backward_errors import refused
from plait.zero.flat_gradient import Buffers, FlatGradient
from plait.zero.gradient_watch import SUM, GradientWatch
from plait.zero.transfers import prepare
from plait.zero.unit import State, Unit
from plait.zero.unshard import Unsharding

Flow = Iterator[None]
"""A reduction in steps: each ``yield`` means that messages are under way; the next step waits for them."""


class UnitGradients:
    """The gradients of a unit, and how far they have come."""

    def __init__(self, unit: Unit, owner: Gradients) -> None:
        self.unit, self.owner, comm = unit, owner, owner.comm
        self.flats = [gradient_of(flat, unit.moves, comm, owner.buffers) for flat in unit.flats if flat.trainable]
        self.direct = all(gradient.direct for gradient in self.flats)
        parameters = [parameter for gradient in self.flats for parameter in gradient.flat.parameters]
        with DisableTorchFunctionSubclass():  # they may be at rest
            self.nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        self.due: int | None = None
        """The number of gradients still missing in this microbatch; None before the first."""
        self.arrived = False
        """True once all gradients of this microbatch have arrived."""
        self.ready = False
        """True once all microbatches are accumulated: the step's own reductions may start."""
        summed = [gradient for gradient in self.flats if gradient.flat.summed]
        path = [(move, summed) for move in unit.moves.summed] + [(move, self.flats) for move in unit.moves.step]
        self.step_messages = [
            (travels(move, comm), [(g, m) for g in flats for m in lower(move, g.flat.layout, comm.mesh, comm.rank)])
            for move, flats in path
            if flats and move.sends(comm.mesh)
        ]
        """The step's messages, move by move, and True if they travel during computation: each move starts from the
        result of the one before."""
        self.microbatch_travels = [travels(move, comm) for move in unit.moves.microbatch]
        """The same for each move of a microbatch."""
        self.can_sleep = self.direct and not unit.split and all(g.flat.sum_dtype == g.flat.dtype for g in self.flats)
        """True if autograd can add to the sums by itself."""
        with DisableTorchFunctionSubclass():  # they may be at rest
            self.hooks = [GradientHook(self, g, index) for g in self.flats for index in range(len(g.flat.parameters))]


class GradientHook:
    """The hook that autograd calls with a parameter after its gradient has been accumulated.

    Its references are weak.  Python's collector cannot see these hooks from their parameter, so a hook that refers to
    the engine, and through it to the parameter, would keep both forever.
    """

    def __init__(self, unit: UnitGradients, gradient: FlatGradient, index: int) -> None:
        self._unit, self._gradient, self._index = ref(unit), ref(gradient), index
        # on a parameter of the user: see docs/guide/your-own-loop.md
        handle = gradient.flat.parameters[index].register_post_accumulate_grad_hook(self)
        self._all: Callable[[], Any] = handle.hooks_dict_ref
        self._key, self._lent = handle.id, cast(Tensor | None, None)

    def __call__(self, parameter: Tensor) -> None:
        unit, gradient = self._unit(), self._gradient()
        if unit is not None and gradient is not None:
            unit.owner.take(parameter, unit, gradient, self._index)

    @property
    def alive(self) -> bool:
        """True if its engine is alive."""
        return self._unit() is not None

    def sleep(self) -> None:
        """Lets autograd add to a sum that has begun: ``p.grad`` is that sum, and no hook is called.

        It does not do so if the user has a hook as well, which looks at the gradient of each microbatch.
        """
        gradient, hooks = self._gradient(), self._all()
        if gradient is not None and self._index in gradient.touched and len(hooks) == 1:
            hooks.clear()
            self._lent = gradient.flat.parameters[self._index]
            self._lent.grad = gradient.sum_of(self._index)

    def wake(self) -> None:
        """Takes the sum back."""
        if (lent := self._lent) is not None:
            self._all()[self._key] = self
            lent.grad = self._lent = None


class Gradients:
    """The gradients of a stage's units, from hook to owner.  Reports to ``unsharding`` which units have arrived."""

    def __init__(self, unsharding: Unsharding, comm: Comm) -> None:
        self.unsharding, self.comm = unsharding, comm
        self.buffers = Buffers(comm)
        self.watch: GradientWatch | None = None
        """Looks at every unit's gradient before it is reduced."""
        self.order = [UnitGradients(unit, self) for unit in reversed(unsharding.units) if unit.trains]
        self.flats = [gradient for unit in self.order for gradient in unit.flats]
        """All flat gradients of the stage, last unit first."""
        self._overlaps = comm.overlaps or not all(unit.direct for unit in self.order)
        self._in_fixed_order = [unit for unit in self.order if not unit.unit.split]
        self._next_reduced = 0
        self._next_step = 0
        self._last = False
        self._active = False
        self._flying: deque[Flow] = deque()
        self._asleep: list[GradientHook] = []

    # ---- one microbatch -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forgets the last step's sums (the buffers stay), after any reduction of it that would still write to them."""
        self.wait()
        self._wake()
        for unit in self.order:
            unit.ready = False
        for gradient in self.flats:
            gradient.begin_step()
        self._next_step = 0
        if self.watch is not None:
            self.watch.clear()

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepares for a backward; ``last`` lets the step's own moves start as units arrive."""
        self._last = last and self._overlaps
        self._active = True
        self._next_reduced = 0
        for unit in self.order:
            unit.due, unit.arrived = None, False
            if unit.can_sleep and unit is not self.order[-1] and not (self._last and unit.step_messages):
                self._asleep += unit.hooks
        for hook in self._asleep:
            hook.sleep()
        for gradient in self.flats:
            gradient.touched_now.clear()

    def take(self, parameter: Tensor, unit: UnitGradients, gradient: FlatGradient, index: int) -> None:
        """Moves one parameter's gradient into the buffer."""
        value = parameter.grad
        if value is not None and gradient.adopting:
            value = value.detach()  # a hook may keep the tensor itself
        parameter.grad = None
        if not self._active:
            raise refused("in the input part" if self.unsharding.in_pass else "outside", gradient.name(index))
        if unit.unit.split and unit.unit.state is not State.UNSHARDED and not self.unsharding.split_backward:
            if value is None:  # an uncalled sibling of a column-cut module: nothing of its unit runs here
                return
            raise refused("not gathered", gradient.name(index), unit.unit.name)
        if value is not None:  # a user's function, or siblings that were not called, may give None
            if value.is_sparse:
                raise refused("sparse", gradient.name(index))
            if unit.arrived or index in gradient.touched_now:
                raise refused("twice", gradient.name(index))
            gradient.take(index, value)
        if unit.due is None:
            unit.due = sum(map(will_engine_execute_node, unit.nodes))
        unit.due -= 1
        if unit.due == 0:
            self._unit_arrived(unit)

    def _unit_arrived(self, unit: UnitGradients) -> None:
        unit.arrived = True
        if unit is self.order[-1] or not unit.direct:
            self._look(unit, self.unsharding.current.context.microbatch)
        self.unsharding.note_gradients(unit.unit)
        if unit.unit.split:
            self._add_microbatch(unit)
        else:
            self._reduce_in_fixed_order()

    def _look(self, unit: UnitGradients, microbatch: int) -> None:
        if self.watch is None:
            return
        for gradient in unit.flats:
            whole = gradient.sums() if gradient.direct else [gradient.transient]
            if come := [part for part in whole if part is not None]:
                self.watch.look(come, microbatch, gradient.name(0))

    def end_microbatch(self) -> None:
        """Ends a microbatch's backward: units that are not split take part with zeros if they did not run here."""
        self._wake()
        for unit in self.order:
            unit.unit.gets_gradients = unit.due is not None
        for unit in self._in_fixed_order:
            unit.arrived = True
        self._reduce_in_fixed_order()
        self._active = False

    def _wake(self) -> None:
        for hook in self._asleep:
            hook.wake()
        self._asleep.clear()

    def _reduce_in_fixed_order(self) -> None:
        """Starts the reductions of units that are not split, up to the first that has not arrived."""
        while self._next_reduced < len(self._in_fixed_order) and self._in_fixed_order[self._next_reduced].arrived:
            unit = self._in_fixed_order[self._next_reduced]
            self._next_reduced += 1
            self._add_microbatch(unit)

    def _add_microbatch(self, unit: UnitGradients) -> None:
        if not unit.direct:
            self._start(self._microbatch_flow(unit))
        elif self._last:
            unit.ready = True
            self._start_steps()

    def _microbatch_flow(self, unit: UnitGradients) -> Flow:
        """Reduces a unit's transient gradients over the axes that split the gradient cell, and adds the pieces."""
        at, last = (unit.unit.name, self.unsharding.current.context.microbatch), self._last
        arriving = [(gradient, gradient.hand_over()) for gradient in unit.flats if not gradient.direct]
        for number, travels in enumerate(unit.microbatch_travels):
            works = [work for g, (whole, piece) in arriving for work in g.start_move(number, whole, piece, *at)]
            if travels:
                yield
            for work in works:
                work.wait()
        for gradient, (whole, piece) in arriving:
            gradient.accumulate(piece)
            self.buffers.give(whole)
        if last:
            unit.ready = True
            self._start_steps()

    def _start(self, flow: Flow) -> None:
        """Issues a flow's first messages, then finishes those before it; the next start, or ``wait``, finishes it."""
        for _ in flow:
            self._flying.append(flow)
            self.wait(left=1)
            return

    def wait(self, *, left: int = 0) -> None:
        """Waits for the reductions under way, except the last ``left``."""
        while len(self._flying) > left:
            for _ in self._flying.popleft():
                pass

    # ---- the step -----------------------------------------------------------------------------------------------

    def _start_steps(self) -> None:
        """Starts the step's moves of units that are ready, in the fixed order."""
        while self._next_step < len(self.order) and self.order[self._next_step].ready:
            unit = self.order[self._next_step]
            self._next_step += 1
            for gradient in unit.flats:
                gradient.fill_missing()
            if unit.direct and unit is not self.order[-1]:  # ``_unit_arrived`` looked at it
                self._look(unit, SUM)
            if unit.step_messages:
                self._start(self._step_flow(unit))

    def _step_flow(self, unit: UnitGradients) -> Flow:
        """Runs the moves from the gradients' cell to the optimizer's."""
        note = Note("step", unit.unit.name)
        for travels, messages in unit.step_messages:
            works = [prepare(self.comm, m, g.accumulated, g.flat.grads_place[0], note).start() for g, m in messages]
            if travels:
                yield
            for work in works:
                work.wait()

    def wipe(self) -> None:
        """Clears every buffer, so that no number that is not finite reaches the next step."""
        for memory in (memory for gradient in self.flats for memory in gradient.sums()):
            memory.zero_()
        self.buffers.clear()

    def touched(self) -> set[str]:
        """The names of the parameters that got a gradient on this rank in this step."""
        return {g.flat.layout.slots[index].name for g in self.flats for index in g.touched}

    def finish_sums(self) -> None:
        """Finishes every sum of the step: afterwards each owner's piece of ``accumulated`` is the whole gradient.  A
        second call does nothing."""
        self.wait()
        for unit in self.order:
            unit.ready = True
        self._start_steps()
        self.wait()


def travels(move: Move, comm: Comm) -> bool:
    """True if a move proceeds during computation.  On several hosts, only moves across hosts do: they start early."""
    mesh = comm.mesh
    return move.sends(mesh) and (mesh.hosts == 1 or any(map(mesh.crosses, move.axes)))
