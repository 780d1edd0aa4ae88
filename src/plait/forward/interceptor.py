"""One function mode that sees every torch function of a forward, and the handlers that it passes them to.

    func ──► AttentionRecompute ─► AtRestCheck ─► Derivatives ─► Products ─► DropoutRNG ──► torch

A handler gets ``(func, call_next, *args, **kwargs)`` and returns what the function returns: by ``call_next``, which is
the function as the handlers after it see it, with these or other arguments, or in another way.  What a handler itself
calls is not seen.

The order matters: handlers to the left of ``Products`` read parameters, those to the right see stand-ins; a
recomputation does again all that the others do; dropout is drawn last.  A handler without work is not in the list.

Which functions a handler sees, and of which parameters every read, is looked up once: a function that no handler sees
costs a dictionary lookup and a glance at its arguments.  Where all are idle (dropout in eval mode) no mode is active,
and an operator costs nothing.  Handlers that had no work in the first ``FIRST`` steps rest: the mode is on, and modules
are followed, in every ``EVERY``-th step only.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from plait.forward.context import CurrentForward
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
"""plait looks for mistakes of a program in an engine's first ``FIRST`` steps, and then once in ``EVERY`` steps."""


def looks(step: int) -> bool:
    """True if a step is one of these; steps count from 0."""
    return step < FIRST or step % EVERY == 0


class Handler:
    """What one part of the engine does to the functions of a forward."""

    parameters: Collection[int] = ()
    """By ``id``: it sees every function that reads one of these."""
    in_eval = True
    """False if it leaves everything alone in a forward that draws no random numbers."""
    rests = False
    """True while it has only looked for mistakes of a program, and had no other work."""
    layers: Mapping[str, nn.Module] = {}
    """Torch's own dropout layers, by name: it has work once the p of one is above 0."""
    rested = False
    """True if it had no work in the first steps, so that forwards have run without it."""

    def sees(self, func: Function) -> bool:
        """Whether it sees a function whatever the arguments are."""
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
    """A function mode of the engine's; to it a compiled unit is one function."""


class Interceptor(EngineMode, StaysHere):
    """The mode of a stage, on while the model runs, in a forward or again in a backward; handlers in their order."""

    def __init__(self, current: CurrentForward, handlers: Iterable[Handler]) -> None:
        super().__init__()
        self.current, self.handlers = current, tuple(handlers)
        self._known = frozenset(key for handler in self.handlers for key in handler.parameters)
        self._routes: dict[Function, tuple[Function, Function | None]] = {}
        """How each function is called, and how if it reads a parameter, where that is another way."""
        self._in_eval = any(handler.in_eval for handler in self.handlers)
        self._resting = False
        """The mode stays off in this step."""
        self._steps = 0
        self._every = False
        """Layers that draw nothing are followed, too."""

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
        """Before the first forward of a step: decides whether the handlers rest; in eval mode they show nothing."""
        rest = all(one.rests and not any(layer.p for layer in one.layers.values()) for one in self.handlers)
        for handler in self.handlers:
            handler.rested = rest and self._steps >= FIRST
        self._resting = rest and not looks(self._steps)
        self._steps += training

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, functions are seen, unless every handler is idle or rests, or it is on already."""
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
            sites: those of the whole model, of which this one is a part.
            every: follows torch's layers that draw nothing, too.
            closed: modules whose insides are left to the compiler (see ``compiled``).
        """
        self._every, self.current.sites = every, sites or Sites(model)
        for name, module in model.named_modules():
            if not any(_inside(name, one) for one in closed):
                self._track(model, name, module)

    def open(self, model: nn.Module, name: str) -> None:
        """Follow the insides of a module that was closed."""
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
        current.enter_module(name, switches=switches, is_model=module is model)

    def _runs_elsewhere(self) -> bool:
        """Whether a stage of the same model runs that has this module in its own parts, or by a reference alone."""
        sites, modes = self.current.sites, active_modes()
        others = (mode for mode in modes if isinstance(mode, Interceptor) and mode is not self)
        return self not in modes and any(mode.current.sites is sites for mode in others)

    def _leave(self, *call: Any) -> None:
        if self.current.leave_module().switches:
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
