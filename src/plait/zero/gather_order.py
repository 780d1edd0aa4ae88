"""Which unit is unsharded next: a pass is expected to repeat the last one of its kind.

the last pass    0 1 2 3 4
this one         0 1 . . .     expected next: 2; after 0 1 4 nothing is
"""

from plait.zero.unit import Unit


class GatherOrder:
    """The order in which a kind of pass unshards units: the prefetch expects it to repeat the last one of its kind."""

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self.seen: list[Unit] = []

    def begin(self) -> None:
        """Begins a pass: it is expected to repeat the last one; nothing is expected of the first."""
        self.expected, self.seen = self.seen, []

    def record(self, unit: Unit) -> None:
        """Records a unit that the pass unshards.  Once it leaves the expected order, the pass prefetches no more."""
        place = len(self.seen)
        if place >= len(self.expected) or self.expected[place] is not unit:
            self.expected = []
        self.seen.append(unit)

    def ahead(self) -> list[Unit]:
        """The units that are expected next."""
        return self.expected[len(self.seen) :]
