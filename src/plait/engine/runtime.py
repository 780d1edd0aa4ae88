"""One runtime that obeys: it carries out a rank's line of a schedule, action by action.

It decides nothing.  Which microbatch comes when is the schedule's business (``core.orders``), what an action means is
the engine's: it hands over one function per kind of action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait.core.actions import Action, Kind

Handlers = Mapping[Kind, Callable[[Action], None]]


def execute(line: Sequence[Action], handlers: Handlers) -> None:
    """Carry out a rank's actions in order."""
    for action in line:
        handlers[action.kind](action)
