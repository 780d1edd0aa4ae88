"""Units that stay whole whatever the passes do, because a program reads their parameters outside the passes.

    pin      SHARDED ──► UNSHARDED         a forward, a backward or an evaluation meanwhile finds everything here
    unpin    UNSHARDED ──► SHARDED         unless a pass uses it, or it was open before
    await    a later backward reads the parameters outside of their own units: they stay until the step is over
             (a penalty was made of them, or a gradient that is differentiated again went through the unit)

A view of the parameters that a program keeps (a state dict) retains its values: the memory is left to it, and the next
gather gets new memory.
"""

from collections.abc import Iterable

from plait.zero.unit import State, Unit


class Pins:
    """The pinned units of a stage."""

    def __init__(self) -> None:
        self.num_backwards = 0
        """Number of backwards that are over."""
        self._closes: dict[Unit, bool] = {}
        """The pinned units, and True for those that unpinning reshards."""
        self._held: set[Unit] = set()
        """The units that are read now."""
        self._awaited: set[Unit] = set()
        """The units that a later backward will read."""

    def add(self, units: Iterable[Unit]) -> list[Unit]:
        """Gathers units that are not here; returns those that the caller has to drop."""
        mine = [unit for unit in units if unit.split and unit not in self._held]
        fresh = [unit for unit in mine if not unit.pinned]
        self._held.update(mine)
        for unit in fresh:
            stays_open = unit.state is State.UNSHARDED and (unit.keeps_open or not unit.users)
            self._closes[unit], unit.pinned = not stays_open, True
            if unit.state is State.SHARDED:
                unit.unshard("state", -1, own=True)
        for unit in fresh:
            if unit.state is State.UNSHARDING:
                unit.wait()
            unit.own()
        return mine

    def drop(self, units: Iterable[Unit], *, read_in_backward: bool = False) -> None:
        """Ends a read of these units."""
        self._held.difference_update(units)
        if read_in_backward:
            self._awaited.update(units)
        self._unpin(units)

    def keep_for_backward(self, units: Iterable[Unit]) -> None:
        """Keeps units for a backward that will read them.  Which one is not known, so they stay for the whole step."""
        self.drop(self.add(units), read_in_backward=True)

    def end_step(self) -> None:
        """Ends the step: every backward is over, or will not come."""
        awaited, self._awaited = self._awaited, set()
        self._unpin(awaited)

    def _unpin(self, units: Iterable[Unit]) -> None:
        for unit in [unit for unit in units if unit not in self._held and unit not in self._awaited]:
            unit.pinned, unit.was_read = False, True
            if self._closes.pop(unit) and not unit.users:
                unit.reshard()
