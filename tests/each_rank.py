"""Tests whose body runs on each rank of a world of threads."""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from plait import run_threads

Test = Callable[..., None]


def on_each_rank(mesh: str) -> Callable[[Test], Test]:
    """The test gets a rank's comm first, and then what pytest gives it."""

    def decorate(body: Test) -> Test:
        @wraps(body)
        def test(**given: Any) -> None:
            run_threads(mesh, partial(body, **given))

        _, *others = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate
