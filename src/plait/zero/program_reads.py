"""Reads of parameters by the program itself, outside of the engine's passes.

    with engine.gathered(): ...   pin ───────────────────────────────► unpin
    torch.autograd.grad(...)      a backward of the program's own gathers units as the engine's does

Where such a backward makes tensors that are differentiated again, its units stay pinned until the step ends.  Passes
leave pinned units open.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from plait.forward.context import graph_is_kept
from plait.torch_private import queue_callback
from plait.zero.unit import State, Unit

if TYPE_CHECKING:
    from plait.zero.unshard import Unsharding

INNER = "inner backward"
"""Ledger phase of a backward that a program runs itself; nothing is prefetched."""


class ProgramReads:
    """The reads of one stage's parameters by the program."""

    def __init__(self, unsharding: Unsharding) -> None:
        self._unsharding = unsharding
        self._pinned_for_step: list[Unit] = []
        self.in_backward = False
        """True from a program's own backward reaching its first unit to the end of that backward."""

    def pin(self, units: Iterable[Unit]) -> list[Unit]:
        """Gathers units, which stay gathered until ``unpin``; returns those that are split."""
        pinned = [unit for unit in units if unit.split]
        for unit in pinned:
            unit.pin()
        for unit in pinned:
            if unit.state is State.UNSHARDING:
                unit.wait()
            unit.own()
        return pinned

    def pin_until_step(self, units: Iterable[Unit]) -> None:
        """Pins units for a backward that will read them; it is not known which, so they stay for the whole step."""
        self._pinned_for_step += self.pin(units)

    def end_step(self) -> None:
        """Ends the step: all its backwards are over, or will not come."""
        while self._pinned_for_step:
            self._pinned_for_step.pop().unpin()

    def begin_backward_of(self, unit: Unit) -> None:
        """Gathers a unit that a program's own backward reaches."""
        if not self.in_backward:
            self.in_backward = True
            queue_callback(partial(self._end_backward, retained=graph_is_kept()))
        self._unsharding.backward_open[unit] = None
        self._unsharding.found.update(unit.needs)
        self._unsharding.unshard(unit, INNER)
        if torch.is_grad_enabled():  # tensors made now read the parameters, and no hook shows when
            self.pin_until_step(unit.needs)

    def _end_backward(self, *, retained: bool) -> None:
        """Ends a program's own backward; ``retained``: its graph stays in memory."""
        self.in_backward = False
        self._unsharding.end_backwards(keep=retained)
