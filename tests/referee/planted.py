"""Faults as functions: a decorated function becomes ``fault(patch)``, and replaces a method while it lasts.

@instead(Stage, "weight")
def weigh_twice(original, self, microbatch, *, last): ...
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

Patch = pytest.MonkeyPatch
Put: TypeAlias = Callable[[Patch], None]
Decorator: TypeAlias = Callable[[Callable[..., Any]], Put]


def instead(owner: Any, name: str) -> Decorator:
    """The function is given the original, and what that is called with."""

    def decorate(fault: Callable[..., Any]) -> Put:
        def put(patch: Patch) -> None:
            original, kind = getattr(owner, name), inspect.getattr_static(owner, name)

            def method(*args: Any, **options: Any) -> Any:
                return fault(original, *args, **options)

            patch.setattr(owner, name, staticmethod(method) if isinstance(kind, staticmethod) else method)

        put.__name__, put.__doc__ = fault.__name__, fault.__doc__
        return put

    return decorate


def before(owner: Any, name: str) -> Decorator:
    """The function runs before the method, with its positional arguments."""

    def decorate(fault: Callable[..., Any]) -> Put:
        def both(original: Any, *args: Any, **options: Any) -> Any:
            fault(*args)
            return original(*args, **options)

        both.__name__ = fault.__name__
        return instead(owner, name)(both)

    return decorate


def after(owner: Any, name: str) -> Decorator:
    """The function runs after the method, with its positional arguments."""

    def decorate(fault: Callable[..., Any]) -> Put:
        def both(original: Any, *args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            fault(*args)
            return result

        both.__name__ = fault.__name__
        return instead(owner, name)(both)

    return decorate
