"""The units of a stage as the planner sees them: where each is gathered in a step, and for which other units."""

from plait.table.flat import UnitLayout
from plait.zero.unit import Unit
from plait.zero.unshard import Unsharding


def layouts_of(unsharding: Unsharding) -> tuple[UnitLayout, ...]:
    """The layouts of a stage's units; before its first step, frozen layers too are expected to have a backward.

    A unit that is read inside another unit that reads it too is open then, and is not gathered again.  The first step
    shows which of two units runs first; before it, the owner is expected to.
    """
    ran = {unit: place for place, unit in enumerate(unsharding.runs)}

    def layout(unit: Unit) -> UnitLayout:
        reading = [other for other in unsharding.units if unit in other.needs]
        outer = [other for other in reading if not set(other.ancestors) & set(reading)]
        (own,) = (other for other in outer if other is unit or other in unit.ancestors)
        lent = [other for other in outer if other is not own]
        before = [other for other in lent if ran.get(other, len(ran)) < ran.get(own, 0)]
        after = [other for other in lent if other not in before]
        return _layout(unit, (*before, own, *after), len(before))

    return tuple(layout(unit) for unit in unsharding.units if unit.flats)


def _layout(unit: Unit, readers: tuple[Unit, ...], own: int) -> UnitLayout:
    """The layout of one unit.  ``readers`` are the units that it is gathered for, in the order in which they run: at
    place ``own`` the unit itself or one around it, and elsewhere units that borrow its parameters."""
    layouts, trainable = tuple(f.layout for f in unit.flats), tuple(f.trainable for f in unit.flats)
    uses = tuple(reader.differentiated for reader in readers)
    summed, reduced = tuple(f.summed for f in unit.flats), unit.gets_gradients or not unit.split
    last_open = max((place for place, reader in enumerate(readers) if reader.stays_open), default=0)
    return UnitLayout(unit.name, layouts, trainable, uses, summed, own, last_open, reduced, unit.flats[0].axes)
