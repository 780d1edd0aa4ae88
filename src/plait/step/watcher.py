"""Watchers: callables that an engine informs of a step's progress.  The engine works the same without any.

    event             when                                                       a watcher may write to
    begun             a step begins, before its first forward                    -
    differentiating   a backward of the program's own loop comes next            -
    backward          gradients are in the engine's buffers                      -
    reducing          the last backward is over; in own loops sums are pending   -
    reduced           gradients are reduced, their norm is not measured yet      gradients (``engine.placed.owned``)
    agreed            the ranks know the norm, nothing is clipped yet            -
    stepping          gradients are clipped, an optimizer comes next             -
    stepped           an optimizer has made its step                             -
    updated           new values are published, the step is over                 -
    discarded         the sums so far were thrown away                           -

If a gradient needs no message, autograd's own tensor becomes the sum (``zero/adopted.py``): until ``reduced``, the
``gradient`` of its owner is empty.

A world adds watchers to every engine that is built on it (``Comm.engine_watchers``); ``Engine(listener=...)`` adds one
of the program's.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Event: TypeAlias = Literal[
    "begun",
    "differentiating",
    "backward",
    "reducing",
    "reduced",
    "agreed",
    "stepping",
    "stepped",
    "updated",
    "discarded",
]

Watcher: TypeAlias = Callable[[Any, Any], None]
"""Called with the event and the engine."""
