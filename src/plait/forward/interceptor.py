"""One function mode that sees every torch function of a forward, and the handlers that it passes them to.

    func ──► AttentionRecompute ─► AtRestCheck ─► Derivatives ─► Products ─► DropoutRNG ──► torch

A handler gets ``(func, call_next, *args, **kwargs)`` and returns the function's result.  It may call ``call_next``, the
function as the handlers after it see it, with these or other arguments, or compute the result in another way.  Calls
that a handler itself makes are not seen.

The order matters: handlers to the left of ``Products`` read parameters, those to the right see stand-ins; a
recomputation repeats the work of all the others; dropout is drawn last.  A handler without work is not in the list.

The interceptor looks up once which handlers see a function, and which of them see it only when it reads a parameter.  A
function that no handler sees costs a dictionary lookup and a glance at its arguments.  Where all handlers are idle
(dropout in eval mode) no mode is active, and an operator costs nothing.  Handlers without work in the first ``FIRST``
steps rest: the mode is on, and modules are followed, only in every ``EVERY``-th step.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from plait.forward.context import CurrentForward, ModuleCall, checkpoint_around, in_backward
from plait.forward.random_ops import quiet
from plait.forward.sites import Sites
from plait.forward.stays import StaysHere
from plait.tensor.metadata import only_metadata
from plait.torch_private import (
    get_function_stack_at,
    len_torch_function_stack,
)

Function = Callable[..., Any]

FIRST, EVERY = 3, 100
"""plait looks for a program's mistakes in an engine's first ``FIRST`` steps, and then once in ``EVERY`` steps."""


def looks(step: int) -> bool:
    """True if plait looks for mistakes in this step; steps count from 0."""
    return step < FIRST or step % EVERY == 0


class Handler:
    """One part of the engine's work on the functions of a forward."""

    parameters: Collection[int] = ()
    """The handler sees every function that reads one of these, by ``id``."""
    in_eval = True
    """False if the handler does nothing in a forward that draws no random numbers."""
    rests = False
    """True while the handler has only looked for a program's mistakes, and had no other work."""
    layers: Mapping[str, nn.Module] = {}
    """Torch's own dropout layers, by name: the handler has work once the p of one is above 0."""
    rested = False
    """True if the handler had no work in the first steps, so that forwards have run without it."""

    def sees(self, func: Function) -> bool:
        """True if the handler sees a function whatever its arguments are."""
        return False

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        return call_next(*args, **kwargs)


def read_among(values: Iterable[Any], known: Container[int]) -> list[int]:
    """The ids of the values that are known by ``id``, also inside lists and tuples."""
    read: list[int] = []
    for value in values:
        if id(value) in known:
            read.append(id(value))
        elif isinstance(value, (list, tuple)):
            read += read_among(value, known)
    return read


class EngineMode(TorchFunctionMode):
    """A function mode that belongs to the engine; it sees a compiled unit as one function."""


class Interceptor(EngineMode, StaysHere):
    """The mode of a stage, on while the model runs, in a forward or again in a backward, with its handlers in order."""

    def __init__(self, current: CurrentForward, handlers: Iterable[Handler]) -> None:
        super().__init__()
        self.current, self.handlers = current, tuple(handlers)
        self._known = frozenset(key for handler in self.handlers for key in handler.parameters)
        self._routes: dict[Function, tuple[Function, Function | None]] = {}
        """The chain for each function, and the one for a call that reads a parameter, where that differs."""
        self._in_eval = any(handler.in_eval for handler in self.handlers)
        self._resting = False
        """True if the mode stays off in this step."""
        self._steps = 0
        self._every = False
        """True if layers that draw nothing are followed, too."""

    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call, reading = self._routes.get(func) or self._route(func)
        if reading is not None:
            known = self._known
            for value in args:
                if id(value) in known or (isinstance(value, (list, tuple)) and read_among(value, known)):
                    call = reading
                    break
            else:
                if kwargs and read_among(kwargs.values(), known):
                    call = reading
        return call(*args, **kwargs) if kwargs else call(*args)

    def _route(self, func: Function) -> tuple[Function, Function | None]:
        seeing = [handler for handler in self.handlers if handler.sees(func)]
        reading = [handler for handler in self.handlers if handler in seeing or handler.parameters]
        same = reading == seeing or only_metadata(func)
        route = _chain(seeing, func), None if same else _chain(reading, func)
        self._routes[func] = route
        return route

    # ---- on and off ---------------------------------------------------------------------------------------------

    def begin_step(self, *, training: bool) -> None:
        """Decides, before a step's first forward, whether the handlers rest; a step in eval mode is not counted."""
        rest = all(one.rests and not any(layer.p for layer in one.layers.values()) for one in self.handlers)
        for handler in self.handlers:
            handler.rested = rest and self._steps >= FIRST
        self._resting = rest and not looks(self._steps)
        self._steps += training

    @contextmanager
    def on(self) -> Iterator[None]:
        """Lets the handlers see functions inside, unless all of them are idle or rest, or the mode is on already."""
        if self._resting or self._idle() or self in active_modes():
            yield
            return
        with self:
            yield

    def _idle(self) -> bool:
        return not self.current.context.draws and not self._in_eval

    def follow(
        self,
        model: nn.Module,
        sites: Sites | None = None,
        *,
        every: bool = False,
        closed: Collection[str] = (),
    ) -> None:
        """Keeps track of which module runs, by hooks; the outermost call switches the mode on.

        Args:
            sites: the sites of the whole model, which contains this one.
            every: also follows torch's layers that draw nothing.
            closed: modules whose insides are left to the compiler (see ``compiled``).
        """
        self._every, self.current.sites = every, sites or Sites(model)
        for name, module in model.named_modules():
            if not any(_inside(name, one) for one in closed):
                self._track(model, name, module)

    def open(self, model: nn.Module, name: str) -> None:
        """Follows the insides of a module that was closed."""
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if inner != name:
                self._track(model, inner, module)

    def _track(self, model: nn.Module, name: str, module: nn.Module) -> None:
        if self._every or module is model or not quiet(module):
            module.register_forward_pre_hook(partial(self._enter, model, name), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: nn.Module, name: str, module: nn.Module, args: Any) -> None:
        current, switches = self.current, False
        if current.context.module.outer is None:
            if current.context.draws != model.training:
                current.replace(draws=model.training)
            if self._idle() or (self._resting and not self._every) or self._runs_elsewhere():
                return
            if switches := self not in active_modes() and not self._resting:
                self.__enter__()  # type: ignore[no-untyped-call]
        self._enter_module(name, switches=switches, is_model=module is model)

    def _enter_module(self, name: str, *, switches: bool, is_model: bool) -> None:
        current = self.current
        context, again, key = current.context, 0, current.sites.key(name)
        counts, outer = context.counts, context.module
        if in_backward() and not outer.again:  # the program's own checkpoint begins here
            known = counts.sites.get(key, key)
            site, again = (key, 2) if known is None or current.begun > 1 else (known, counts.calls.get(known, 1))
            counts.masks[site] = 0
        else:
            site = current.sites.enter(outer.site, name, counts.turns)
            if site == outer.site and name:  # a part of the module that calls it
                counts.sites[key], again = None, outer.again
            elif outer.again:
                counts.masks[site], again = 0, max(outer.again, counts.calls.get(site, 1))
            else:
                counts.calls[site] = counts.calls.get(site, 0) + 1
                counts.sites[key] = site if counts.sites.get(key, site) == site else None
        in_model = is_model or outer.in_model
        current.context = context.within(
            ModuleCall(name, outer, checkpoint_around(), again, outer.twice, switches, in_model, site)
        )

    def _runs_elsewhere(self) -> bool:
        """True if another stage of the same model runs, one that owns this module or only refers to it."""
        sites, modes = self.current.sites, active_modes()
        others = (mode for mode in modes if isinstance(mode, Interceptor) and mode is not self)
        return self not in modes and any(mode.current.sites is sites for mode in others)

    def _leave(self, *_: Any) -> None:
        """Leaves the innermost module, whose forward has ended or raised; does nothing if it raised before it began."""
        call = self.current.context.module
        if call.outer is not None:
            self.current.context = self.current.context.within(call.outer)
        if call.switches:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _inside(name: str, outer: str) -> bool:
    return name != outer and name.startswith(f"{outer}." if outer else "")


def active_modes() -> list[Any]:  # of this thread, outermost first
    return [get_function_stack_at(i) for i in range(len_torch_function_stack())]


def _chain(handlers: Sequence[Handler], func: Function) -> Function:
    call = func
    for handler in reversed(handlers):
        call = partial(handler, func, call)
    return call
