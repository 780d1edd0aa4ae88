"""Notices numbers from the generators of Python and numpy in a training forward, and refuses them.

They belong to the process: their values depend on everything drawn before, on the rank, in the thread.  torch's random
functions are seen as they are called; these cannot be, so the generators' states are compared around the passes of a
step.  A state is some kilobytes.

Another thread may have drawn in the meantime (a loader, another rank), or the loop itself.  Where there are any, the
code of the model decides: a function of its classes, or one that these call, must mention the generator.
"""

import functools
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from plait.step.engine import Engine

DEEPEST = 3
"""Most levels of calls that are followed from a function of the model."""


class HostRandomness:
    """Compares the generators of the process around the passes of a step.

    Args:
        loss_fn: the program's loss, which belongs to the forward.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._before: dict[str, object] = {}

    def __call__(self, event: str, engine: Engine) -> None:
        """Follows a step."""
        if event == "begun":
            self._before = _states()
        elif event == "backward":
            self.check(alone=not engine.in_own_loop)

    def check(self, *, alone: bool) -> None:
        """Looks after the last backward of ``engine.step``, or the first one of a program's own loop.

        Args:
            alone: nothing but the passes has run in this thread since ``begin``.

        Raises:
            ValueError: the model or the loss has drawn.
        """
        before, self._before = self._before, {}
        if not before:
            return
        after = _states()
        for name in (name for name, state in before.items() if after[name] != state):
            who = next(_who_draws(name, self.model, self.loss_fn), None)
            if who is None and (not alone or threading.active_count() > 1):
                continue
            raise ValueError(
                f"{who or 'the model, or loss_fn,'} draws from the generator of {name} in a training forward, which "
                f"belongs to the process: its values would depend on the rank and on how the batch is cut. Use torch's "
                f"(torch.rand of [samples, ...], or of [] for one number a step), which plait serves by position, or "
                f"draw in the data pipeline"
            )


def _states() -> dict[str, object]:
    states: dict[str, object] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *rest)
    return states


def _who_draws(generator: str, model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[str]:
    """The functions of the model's classes, and the loss, that mention a generator."""
    seen: set[CodeType] = set()
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        kinds = [k for k in type(module).__mro__ if k is not object and not k.__module__.startswith("torch.")]
        functions = [(kind.__name__, key, value) for kind in kinds for key, value in vars(kind).items()]
        functions += [(type(module).__name__, key, value) for key, value in vars(module).items()]
        for kind, key, value in functions:
            if key != "__init__" and _mentions(value, generator, seen):
                yield f"{where} ({kind}.{key})"
    if loss_fn is not None and _mentions(loss_fn, generator, seen):
        yield "loss_fn"


def _mentions(function: Any, generator: str, seen: set[CodeType], depth: int = 0) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    known = function.__globals__
    inside = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for code in _codes(function.__code__):
        for word in (*code.co_names, *code.co_freevars):
            value = known.get(word)
            if word in inside:
                try:
                    value = inside[word].cell_contents
                except ValueError:  # not bound yet
                    continue
            if _is_generator(value, generator, code):
                return True
            if depth < DEEPEST and isinstance(value, FunctionType) and _mentions(value, generator, seen, depth + 1):
                return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_generator(value: Any, generator: str, code: CodeType) -> bool:
    """True if a global of this value leads to the generator: a module, or one of its functions."""
    if generator == "random":
        return value is random or isinstance(getattr(value, "__self__", None), random.Random)
    numpy = sys.modules["numpy"]
    through = value is numpy and "random" in code.co_names
    return through or value is numpy.random or getattr(value, "__self__", None) is numpy.random.mtrand._rand
