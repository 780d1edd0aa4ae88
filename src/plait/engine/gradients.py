"""How gradients reach their owners.

Autograd hands over a parameter's gradient once per backward.  A hook takes it, in one pass, into the unit's flat
gradient buffer (the first microbatch is copied, later ones are added), and when the last gradient of the unit has
come the row's ``microbatch`` move starts:

    row          a microbatch's gradient goes            after the microbatch              at the step
    ddp, zero1   straight into the full accumulator      -                                 all_reduce / reduce_scatter
    hsdp, psdp   into a transient buffer                 reduce_scatter, piece is added    all_reduce / reduce_scatter
    zero2, 3     into a transient buffer                 reduce_scatter, piece is added    -

Which parameters got a gradient at all is tracked apart: zero is a gradient, none is not.

Sums that wait for the step start as soon as a unit's last backward is over, if messages travel beside computation; on
a CPU without a core to spare they would only take turns with it, and go faster in one go after the backward.

*Order.*  Where parameters are split, every rank runs the same units in the same order (their gathers would not
match otherwise), so a microbatch's reductions start as units complete.  All other reductions start in one fixed
order, last unit first; a unit that did not run here still takes part, with zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.core.collectives import Note
from plait.core.flat import lower
from plait.engine.gathering import Gathering
from plait.engine.unit import Flat, Unit, send

Flow = Iterator[None]
"""A reduction in steps: each ``yield`` means that messages are under way; the next step waits for them."""


class Buffers:
    """Transient gradient buffers, reused: fresh memory costs page faults.

    A larger buffer serves a smaller unit, and one that is too small is given up for a larger one, so there are never
    more buffers than were in use at once.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._bases: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        same = sorted((t for t in self._free if t.dtype == dtype), key=Tensor.numel)
        base = next((t for t in same if t.numel() >= numel), None)
        if same:
            gone = same[-1] if base is None else base
            self._free = [t for t in self._free if t is not gone]
        if base is None:
            base = torch.zeros(numel, dtype=dtype, device=device)
        view = base[:numel]
        self._bases[id(view)] = base
        return view

    def give(self, view: Tensor) -> None:
        self._free.append(self._bases.pop(id(view)))

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._free)


class FlatGradient:
    """The gradient of one flat buffer: its accumulator (this rank's piece) and what the microbatch adds."""

    def __init__(self, flat: Flat, buffers: Buffers) -> None:
        self.flat, self.buffers = flat, buffers
        start, stop = flat.grads_place
        self.direct = not flat.grads_split
        """The accumulator holds every element, so gradients are taken straight into it."""
        self.accumulated = torch.zeros(stop - start, dtype=flat.sum_dtype, device=flat.rest.device)
        self.views = self._cut(self.accumulated) if self.direct else []
        self.transient: Tensor | None = None
        self.touched: set[int] = set()
        self.touched_now: set[int] = set()
        self.started = False
        self.claimed = False
        """A reduction writes, or has written, the first microbatch's sum into the accumulator."""

    def _cut(self, whole: Tensor) -> list[Tensor]:
        """A view for every parameter."""
        return [whole[slot.offset : slot.end].view(slot.shape) for slot in self.flat.layout.slots]

    def take(self, index: int, gradient: Tensor) -> None:
        """Move one parameter's gradient into the buffer."""
        if not self.direct and self.transient is None:
            self.transient = self.buffers.take(self.flat.layout.numel, self.flat.sum_dtype, self.flat.rest.device)
            self.views = self._cut(self.transient)
        if self.direct and index in self.touched:
            self.views[index].add_(gradient)
        else:
            self.views[index].copy_(gradient)
        self.touched_now.add(index)
        self.touched.add(index)

    def fill_untouched(self, target: Tensor, touched: set[int]) -> None:
        """Zeros for the parameters that got no gradient here: others may have one."""
        for index, slot in enumerate(self.flat.layout.slots):
            if index not in touched:
                target[slot.offset : slot.end].zero_()

    def accumulate(self, piece: Tensor) -> None:
        if self.started:
            self.accumulated.add_(piece)
        elif piece.data_ptr() != self.accumulated.data_ptr():
            self.accumulated.copy_(piece)
        self.started = True


class Gradients:
    """The gradients of every unit of a stage, from hook to owner.

    Args:
        gathering: told when a unit's backward is complete.
        depth: how many units' reductions may be under way at once.
    """

    def __init__(self, gathering: Gathering, comm: Comm, depth: int = 1) -> None:
        self.gathering, self.comm, self.depth = gathering, comm, depth
        self.buffers = Buffers()
        self.flats: dict[Unit, list[FlatGradient]] = {
            unit: [FlatGradient(f, self.buffers) for f in unit.flats if f.trainable] for unit in gathering.units
        }
        self.order = [unit for unit in reversed(gathering.units) if self.flats[unit]]
        direct = all(g.direct for gradients in self.flats.values() for g in gradients)
        self.overlap = comm.overlaps or not direct
        self.last = False
        self._active = False
        self._nodes = {
            unit: [torch.autograd.graph.get_gradient_edge(p).node for g in self.flats[unit] for p in g.flat.parameters]
            for unit in self.order
        }
        self._due: dict[Unit, int] = {}
        self._complete: set[Unit] = set()
        self._reduced: set[Unit] = set()
        self._stepped: set[Unit] = set()
        self._next_step = 0
        self._flying: deque[Flow] = deque()
        for unit in self.order:
            for gradient in self.flats[unit]:
                for index, parameter in enumerate(gradient.flat.parameters):
                    parameter.register_post_accumulate_grad_hook(self._hook(unit, gradient, index))

    @property
    def every(self) -> list[FlatGradient]:
        """All of them, last unit first."""
        return [g for unit in self.order for g in self.flats[unit]]

    # ---- one microbatch -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step's sums (the buffers stay)."""
        for gradients in self.flats.values():
            for g in gradients:
                g.touched.clear()
                g.started = g.claimed = False
        self._stepped.clear()
        self._next_step = 0
        self._flying.clear()

    def begin_microbatch(self, *, last: bool) -> None:
        """Before a backward; ``last`` lets the step's own moves start as units complete."""
        self.last = last and self.overlap
        self._active = True
        self._due.clear()
        self._complete.clear()
        self._reduced.clear()
        for gradients in self.flats.values():
            for g in gradients:
                g.touched_now.clear()

    def _hook(self, unit: Unit, gradient: FlatGradient, index: int) -> Callable[[Tensor], None]:
        """What autograd calls with a parameter that has its gradient.

        It refers to all else weakly: Python's collector does not see these hooks from their parameter, so one that held
        the engine, and by it the parameter, would keep both for ever.
        """
        taking, of_unit, of_gradient = WeakMethod(self._take), ref(unit), ref(gradient)

        def hook(parameter: Tensor) -> None:
            take, unit, gradient = taking(), of_unit(), of_gradient()
            if take is not None and unit is not None and gradient is not None:
                take(parameter, unit, gradient, index)

        return hook

    def _take(self, parameter: Tensor, unit: Unit, gradient: FlatGradient, index: int) -> None:
        """One parameter's gradient goes into the buffer."""
        name = gradient.flat.layout.slots[index].name
        if not self._active:
            parameter.grad = None
            raise ValueError(
                "loss.backward() was called on a model that plait drives: call engine.backward(loss, count) instead"
            )
        if unit.split and not unit.filled and not self.gathering.split_backward:
            raise ValueError(
                f"the gradient of {name!r} came while its unit {unit.name!r} was not gathered: the module "
                f"hands a tensor out beside its return value; return it, so that its backward can be seen"
            )
        value, parameter.grad = parameter.grad, None
        if value is None:  # a function of the user's, or siblings that were not called, had none to give
            self._arrived(unit)
            return
        if value.is_sparse:
            raise ValueError(f"the gradient of {name!r} is sparse: build the embedding with sparse=False")
        if unit in self._complete or index in gradient.touched_now:
            raise ValueError(
                f"{name!r} got a second gradient in one microbatch (two backward calls, a reentrant checkpoint): "
                f"add the losses, call backward once, and use checkpoint(..., use_reentrant=False)"
            )
        gradient.take(index, value)
        self._arrived(unit)

    def _arrived(self, unit: Unit) -> None:
        """One more of the unit's parameters has its gradient, or the word that it gets none."""
        if unit not in self._due:
            self._due[unit] = sum(torch._C._will_engine_execute_node(node) for node in self._nodes[unit])
        self._due[unit] -= 1
        if self._due[unit] == 0:
            self._unit_complete(unit)

    def _unit_complete(self, unit: Unit) -> None:
        self._complete.add(unit)
        self.gathering.has_gradients(unit)
        if unit.split:
            self._start(self._microbatch_flow(unit))
        else:
            self._release()

    def end_microbatch(self) -> None:
        """After a backward: the units that did not run here take their part with zeros, where others may have run."""
        self._complete.update(unit for unit in self.order if not unit.split)
        self._release()
        self._active = False

    def _release(self) -> None:
        """Start reductions of complete units in the fixed order, as far as they are complete."""
        for unit in self.order:
            if unit.split or unit in self._reduced:
                continue
            if unit not in self._complete:
                return
            self._reduced.add(unit)
            self._start(self._microbatch_flow(unit))

    def _start(self, flow: Flow) -> None:
        """Issue a flow's first messages; finish older flows, so that at most ``depth`` are under way."""
        for _ in flow:
            self._flying.append(flow)
            self._drain(self.depth)
            return

    def _drain(self, left: int) -> None:
        while len(self._flying) > left:
            for _ in self._flying.popleft():
                pass

    def _microbatch_flow(self, unit: Unit) -> Flow:
        """Reduce a unit's transient gradients over the axes that the gradient cell splits, and add the pieces."""
        mesh, rank = self.comm.mesh, self.comm.rank
        note = Note("microbatch", unit.name, self.gathering.microbatch)
        works, arriving = [], []
        for g in self.flats[unit]:
            if g.direct:
                continue
            if g.transient is None:
                g.transient = self.buffers.take(g.flat.layout.numel, g.flat.sum_dtype, g.flat.rest.device)
            g.fill_untouched(g.transient, g.touched_now)
            whole, g.transient, g.views = g.transient, None, []
            piece = whole[slice(*g.flat.grads_place)]
            if g.flat.layout.even and not g.claimed:
                piece = g.accumulated
            g.claimed = True
            arriving.append((g, whole, piece))
            for move in unit.moves.microbatch:
                works += [send(self.comm, m, whole, 0, note, out=piece) for m in lower(move, g.flat.layout, mesh, rank)]
        last = self.last
        if works:
            yield
        for work in works:
            work.wait()
        for g, whole, piece in arriving:
            g.accumulate(piece)
            self.buffers.give(whole)
        if last:
            self._ready(unit)

    # ---- the step -----------------------------------------------------------------------------------------------

    def _ready(self, unit: Unit) -> None:
        """The unit has its last microbatch's sum; the step's moves start in the fixed order."""
        self._stepped.add(unit)
        self._start_steps()

    def _start_steps(self) -> None:
        while self._next_step < len(self.order) and self.order[self._next_step] in self._stepped:
            unit = self.order[self._next_step]
            self._next_step += 1
            self._start(self._step_flow(unit))

    def _step_flow(self, unit: Unit) -> Flow:
        """The moves from the gradients' cell to the optimizer's."""
        mesh, rank = self.comm.mesh, self.comm.rank
        for g in self.flats[unit]:
            if g.direct:
                g.fill_untouched(g.accumulated, g.touched)
            elif not g.started:
                g.accumulated.zero_()
        summed = [g for g in self.flats[unit] if g.flat.summed]
        path = [(move, summed) for move in unit.moves.summed] + [(move, self.flats[unit]) for move in unit.moves.step]
        for move, flats in path:
            works = [
                send(self.comm, m, g.accumulated, g.flat.grads_place[0], Note("step", unit.name))
                for g in flats
                for m in lower(move, g.flat.layout, mesh, rank)
            ]
            if works:
                yield
            for work in works:
                work.wait()

    def touched(self) -> set[str]:
        """The parameters that got a gradient on this rank in this step."""
        return {g.flat.layout.slots[i].name for gs in self.flats.values() for g in gs for i in g.touched}

    def finish(self) -> None:
        """Wait for the reductions under way."""
        self._drain(0)

    def reduce(self) -> None:
        """Finish every sum of the step: afterwards each owner's piece of ``accumulated`` is the whole gradient."""
        self._drain(0)
        self._stepped.update(self.order)
        self._start_steps()
        self._drain(0)


def parameters_of(units: Sequence[Unit]) -> Iterator[tuple[str, nn.Parameter, Flat, int]]:
    """Every parameter of the units: its name, itself, its flat and its place there."""
    for unit in units:
        for flat, index in unit.slots():
            yield flat.layout.slots[index].name, flat.parameters[index], flat, index
