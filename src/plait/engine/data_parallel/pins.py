"""Units that stay whole whatever the passes do, because someone reads their parameters beside them.

    pin      SHARDED ──► UNSHARDED         a forward, a backward or an evaluation meanwhile finds everything here
    unpin    UNSHARDED ──► SHARDED         unless a pass uses it, or it was open before
    await    a penalty was made of the parameters: they stay until the backward that reads them is over

A view that someone took of the parameters and keeps (a state dict) stays what it was: the memory is left to it, and the
next gather gets its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.engine.data_parallel.unit import State, Unit


class Pins:
    """The pinned units of a stage."""

    def __init__(self) -> None:
        self._closes: dict[Unit, bool] = {}
        """Whether they are resharded when they are unpinned."""
        self._awaited: list[Unit] = []

    def add(self, units: Iterable[Unit]) -> list[Unit]:
        """Gather what is not here; returns those that are pinned now and were not before."""
        fresh = [unit for unit in units if unit.split and not unit.pinned]
        for unit in fresh:
            self._closes[unit], unit.pinned = unit.state is not State.UNSHARDED, True
            if unit.state is State.SHARDED:
                unit.unshard("state", -1)
        for unit in fresh:
            if unit.state is State.UNSHARDING:
                unit.wait()
            unit.count_holders()
        return fresh

    def drop(self, units: Iterable[Unit]) -> None:
        """They need not stay any more."""
        for unit in units:
            unit.pinned = False
            if self._closes.pop(unit) and not unit.users:
                unit.leave_to_holders()
                unit.reshard()

    def wait_for_backward(self, units: Iterable[Unit]) -> None:
        """They stay until the backward is over."""
        self._awaited += units

    def end_backward(self) -> None:
        """It is."""
        awaited, self._awaited = self._awaited, []
        self.drop(awaited)
