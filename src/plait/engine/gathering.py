"""When units are gathered and freed.

Forward and backward hooks on the module of each unit that reads split parameters call ``open`` before they are read and
``close`` after; between them lies the *prefetch*: while one unit computes, the gather of the next is under way.

    forward     open 0 | compute 0 ‖ gather 1 | close 0, open 1 | compute 1 ‖ gather 2 | ...
    backward    the same from the other end, each unit gathered again where the row freed it

Under a pipeline the schedule may hold a whole stage unsharded over several passes (``hold``, ``release``); then the
hooks find everything there.

The order of gathers is the program's own order, which all ranks share; the prefetch follows the order of the
previous microbatch and stops for the rest of a pass that leaves it.  At most 1 + prefetch units are unsharded
beside the open ancestors of the running one: asserted at every gather.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from plait.engine.rng import Streams, in_backward
from plait.engine.unit import Unit
from plait.engine.watch import Watch

EVALUATE = "evaluate"
"""How the ledger calls an evaluation, which has an order of gathers of its own."""


class Pass:
    """The order in which one pass (forward, backward or evaluation) opens units, and how far it has come."""

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self.seen: list[Unit] = []
        self.following = False

    def begin(self, guess: Sequence[Unit] = ()) -> None:
        """A new pass: it is expected to repeat the last one, or to follow the guess when there was none."""
        self.expected = self.seen or list(guess)
        self.seen = []
        self.following = bool(self.expected)

    def record(self, unit: Unit) -> None:
        at = len(self.seen)
        self.following = self.following and at < len(self.expected) and self.expected[at] is unit
        self.seen.append(unit)

    def ahead(self) -> Sequence[Unit]:
        """The units that are expected next."""
        return self.expected[len(self.seen) :] if self.following else ()


class Gathering:
    """The units of one stage: the hooks, the order of gathers, the bound on what is open.

    Args:
        model: the stage's module; only hooks are added to it.
        units: every unit, in the order of ``named_modules``.
        prefetch: how many units may be gathered ahead of the running one.
        streams: the dropout streams, told which module runs.
        watch: told which parameters are split and which unit runs.
        before_root: called with the model's arguments before each forward of the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        prefetch: int,
        streams: Streams,
        watch: Watch,
        before_root: Callable[[Sequence[Any], dict[str, Any]], None],
    ) -> None:
        self.model, self.units, self.prefetch, self.streams = model, list(units), prefetch, streams
        self.passes = {"forward": Pass(), "backward": Pass(), EVALUATE: Pass()}
        self.phase = "forward"
        """Of forwards at the moment."""
        self.microbatch = 0
        """Of the pass that runs, for the ledger."""
        self.flight = 0
        """Which forward a backward belongs to, where several are under way (a user's own loop has one)."""
        self.num_flying = 0
        self.held = False
        self.split_backward = False
        """Weight gradients of the pass that runs are made in one of their own, after the units have been closed."""
        self.peak_open = 0
        self.peak_bytes = 0
        """The most bytes of gathered parameters at once, of all stages of the rank."""
        self.peers: list[Gathering] = [self]
        """Those of all stages of the rank."""
        self._inside: list[Unit] = []
        """The units whose forward is under way, innermost last."""
        self._backward_open: dict[Unit, None] = {}
        self._ran_backward: set[Unit] = set()
        self._has_gradients: set[Unit] = set()
        self._inputs: defaultdict[int, Counter[Unit]] = defaultdict(Counter)
        """Inputs of a unit, over all its calls in a microbatch, whose gradients are still to come."""
        self._hooks: defaultdict[int, list[RemovableHandle]] = defaultdict(list)
        self._before_root = before_root
        self._watch = watch
        for unit in units:
            watch.split |= {id(p) for flat in unit.flats if flat.split for p in flat.parameters}
            if unit.split_needs:
                # before hooks of the user's, which may read parameters (weight_norm), as the one behind is after them
                unit.module.register_forward_pre_hook(self._before_forward(unit), with_kwargs=True, prepend=True)
                unit.module.register_forward_hook(self._after_forward(unit))
        model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._after_model, always_call=True)

    def beside(self, gatherings: Sequence[Gathering]) -> None:
        """These are the gatherings of all stages of the rank, this one among them."""
        self.peers = list(gatherings)

    # ---- opening and closing ------------------------------------------------------------------------------------

    def open(self, unit: Unit, phase: str) -> None:
        """Make the parameters that a unit reads whole, and start to gather what comes next."""
        order = self.passes[phase]
        for needed in unit.needs:
            needed.users += 1
            if needed.users == 1 or not needed.filled:
                if needed.split:
                    order.record(needed)
                needed.gather(phase, self.microbatch)
                self._measure(unit, phase)
                needed.show()
        for coming in order.ahead():
            if sum(1 for u in self.units if u.users == 0 and (u.works is not None)) >= self.prefetch:
                break
            if not coming.filled and coming.works is None:
                coming.gather(phase, self.microbatch)
                self._measure(unit, phase)

    def close(self, unit: Unit, *, keep: bool, keep_borrowed: bool) -> None:
        """The unit's parameters are not read any more for now.

        Args:
            keep: a backward is to come: keep what the row keeps from forward to backward.
            keep_borrowed: the owners of borrowed parameters still have their own backward to come.
        """
        for needed in unit.needs:
            needed.users -= 1
            if needed.users == 0 and needed.split:
                if needed.keeps_open and (keep or (keep_borrowed and needed is not unit)):
                    continue
                if keep:
                    needed.keep()
                needed.free()

    def _measure(self, running: Unit, phase: str) -> None:
        """Asserts the bound on open units and keeps the peaks for the report.

        In backward a unit stays in use until its last gradient has come, which may be after the next one began; such
        late units are counted apart.  In forward there are none.
        """
        held = [u for u in self.units if u.split and (u.filled or u.works is not None)]
        self._note_bytes()
        around = {id(needed) for u in self.units if u.users and u.name in running.ancestors for needed in u.needs}
        beside = [u for u in held if id(u) not in around and u.name not in running.ancestors and not u.keeps_open]
        borrowed = len([u for u in running.needs if u is not running])
        late = [u for u in beside if u.users and u not in running.needs]
        self.peak_open = max(self.peak_open, 0 if self.held else len(beside))
        bound = 1 + self.prefetch + borrowed + (len(late) if phase == "backward" else 0)
        assert self.held or len(beside) <= bound, (
            f"{len(beside)} units are unsharded beside the ancestors of {running.name!r} "
            f"({', '.join(u.name for u in beside)}), more than {bound}"
        )

    def _note_bytes(self) -> None:
        units = [unit for peer in self.peers for unit in peer.units if unit.split]
        self.peak_bytes = max(self.peak_bytes, sum(u.bytes_full for u in units if u.filled or u.works is not None))

    # ---- held by the schedule -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """UNSHARD: gather every unit at once, and keep it; the first pass that reads one waits for it."""
        self.held = True
        for unit in self.units:
            unit.users += 1
            unit.gather("unshard", -1)
        self._note_bytes()

    def release(self) -> None:
        """RESHARD: back to rest; what the row keeps from forward to backward is kept while a microbatch is between."""
        self.held = False
        for unit in self.units:
            unit.users -= 1
            if unit.split:
                if self.num_flying:
                    unit.show()
                    unit.keep()
                unit.free()
                if not self.num_flying:
                    unit.forget()

    # ---- forward ------------------------------------------------------------------------------------------------

    def begin_forward(self, microbatch: int, *, split: bool = False) -> None:
        """Before the forward of a microbatch of a step.

        Args:
            split: its backward comes in two parts.
        """
        self.microbatch = self.flight = microbatch
        self.split_backward = split
        self.num_flying += 1

    def begin_alone(self, microbatch: int) -> None:
        """Before a forward that no backward follows."""
        self.microbatch = self.flight = microbatch

    def number(self, microbatch: int) -> None:
        """Which forward of a user's own loop begins, for the ledger."""
        self.microbatch = microbatch

    def _before_model(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            if not self.held:
                self._recover()
            self._before_root(args, kwargs)
            self.passes[self.phase].begin()
            self._watch.inside = True

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            self._watch.inside = False

    def begin_step(self) -> None:
        """Whatever an earlier step left behind when it raised is gone."""
        self.held = False
        self.num_flying = 0
        self._recover()
        self._inputs.clear()
        self._drop_hooks(*self._hooks)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards inside have no backward, and leave the order of the step's gathers alone."""
        self.begin_step()
        self.phase = EVALUATE
        try:
            yield
        finally:
            self.phase = "forward"

    def _recover(self) -> None:
        """After a forward or backward that raised, and was caught, units may still be open: back to rest."""
        self._backward_open.clear()
        self._watch.running.clear()
        self._watch.inside = False
        self._inside.clear()
        for unit in self.units:
            if unit.users:
                unit.users = 0
                unit.free()

    def forget(self) -> None:
        """Whatever is gathered or kept goes: the microbatch is over, or the parameters have changed."""
        for unit in self.units:
            if unit.split and (unit.filled or unit.works is not None):
                unit.free()
            unit.forget()

    def _before_forward(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            if in_backward():
                self._open_backward(unit)
                return
            with torch._C.DisableTorchFunction():  # the engine's own work is nobody's forward
                self.open(unit, self.phase)
            self._watch.running.append(partial(self._open_backward, unit))
            self._inside.append(unit)
            if torch.is_grad_enabled() and self._waits_for_inputs(unit):
                self._await_inputs(unit, (*args, *kwargs.values()))

        return hook

    def _waits_for_inputs(self, unit: Unit) -> bool:
        return self.split_backward or not unit.done_with_gradients

    def _await_inputs(self, unit: Unit, inputs: Sequence[Any]) -> None:
        """Count the inputs whose gradients tell that the unit's backward is over."""
        waiting = self._inputs[self.flight]

        def arrived(gradient: Tensor) -> None:
            waiting[unit] -= 1
            self._close_when_done(unit)

        for tensor in tree_leaves(inputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                waiting[unit] += 1
                self._when_gradient_comes(tensor, arrived)

    def _when_gradient_comes(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        """Call when the tensor's gradient comes in this microbatch (a hook on a parameter would stay for ever)."""
        self._hooks[self.flight].append(tensor.register_hook(call))

    def _after_forward(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return
            self._leave(self._inside.pop(), output)

        return hook

    def unwind(self, output: Tensor) -> None:
        """The model's forward ended in its midst, with ``output``: the units around it are left as well."""
        while self._inside:
            self._leave(self._inside.pop(), output)

    def _leave(self, unit: Unit, output: Any) -> None:
        self._watch.running.pop()
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        tracked = [t for t in tensors if t.requires_grad]
        if torch.is_grad_enabled() and not tensors:
            raise ValueError(
                f"unit {unit.name!r} returns {type(output).__name__}, in which no tensor is found: return "
                f"tensors, or tuples, lists, dicts or registered pytrees of them, so that its backward can be seen"
            )
        for tensor in tracked:
            self._when_gradient_comes(tensor, lambda gradient: self._open_backward(unit))
        with torch._C.DisableTorchFunction():
            self.close(unit, keep=bool(tracked), keep_borrowed=False)

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, microbatch: int | None, *, split: bool = False) -> None:
        """Before the backward of a microbatch, or the input part of one.

        Args:
            microbatch: None: that of the last forward (a user's own loop).
            split: it is the input part; the weights' gradients come later.
        """
        if microbatch is not None:
            self.microbatch = self.flight = microbatch
        self.split_backward = split
        self.passes["backward"].begin(guess=list(reversed(self.passes["forward"].seen)))
        self._ran_backward.clear()

    def begin_weights(self, microbatch: int) -> None:
        """Before the weight part of a microbatch's backward, which reads no parameter."""
        self.microbatch = microbatch
        self.split_backward = True

    def _open_backward(self, unit: Unit) -> None:
        if unit not in self._backward_open and unit not in self._ran_backward:
            self._backward_open[unit] = None
            self.open(unit, "backward")

    def has_gradients(self, unit: Unit) -> None:
        """Every parameter of the unit's own that gets a gradient has it."""
        self._has_gradients.add(unit)
        self._close_when_done(unit)

    def _close_when_done(self, unit: Unit) -> None:
        """A unit is done when its parameters have their gradients and, where that is not enough, its inputs too.

        One whose inputs want no gradient is closed at the end of the backward.
        """
        if unit.trains and unit not in self._has_gradients and not self.split_backward:
            return
        if not self._waits_for_inputs(unit) or self._inputs[self.flight].get(unit) == 0:
            self._close_backward(unit)

    def _close_backward(self, unit: Unit) -> None:
        if unit in self._backward_open:
            del self._backward_open[unit]
            self._ran_backward.add(unit)
            self.close(unit, keep=self.num_flying > 1, keep_borrowed=True)

    def end_backward(self) -> None:
        """After the backward of a microbatch: whatever is still gathered goes back to rest."""
        for unit in list(self._backward_open):
            self._close_backward(unit)
        self._has_gradients.clear()
        self._inputs.pop(self.flight, None)
        self._drop_hooks(self.flight)
        self.num_flying = max(0, self.num_flying - 1)
        for unit in self.units:
            users = unit.users - self.held
            assert users == 0, f"unit {unit.name!r} still has {users} users after the backward pass"
        if not self.held and not self.num_flying:
            self.forget()

    def _drop_hooks(self, *flights: int) -> None:
        for flight in flights:
            for hook in self._hooks.pop(flight, ()):
                hook.remove()
