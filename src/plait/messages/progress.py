"""Long loops report their progress: ``for rank in counted("ranks", ranks)``.  A command may show it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
UPDATES = 200
"""The most reports of one loop."""

_show: ContextVar[Callable[[str, int, int], object]] = ContextVar("show", default=lambda what, done, total: None)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yields the items in order, and reports the progress."""
    show, every = _show.get(), max(1, len(items) // UPDATES)
    for done, item in enumerate(items):
        if done % every == 0:
            show(what, done, len(items))
        yield item


@contextmanager
def shown_by(show: Callable[[str, int, int], object]) -> Iterator[None]:
    """Calls ``show(what, done, total)`` for the loops of this thread inside."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)
