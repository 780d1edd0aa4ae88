"""The order in which passes unshard units: each is expected to repeat the last one of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.engine.data_parallel.unit import Unit


class GatherOrder:
    """That of one kind of pass (forward, backward or evaluation), and how far the pass has come."""

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self.seen: list[Unit] = []

    def begin(self, guess: Sequence[Unit] = ()) -> None:
        """A new pass: it is expected to repeat the last one, or to follow the guess when there was none."""
        self.expected = self.seen or list(guess)
        self.seen = []

    def record(self, unit: Unit) -> None:
        """What the pass unshards now; one that leaves the expected order has none to follow any more."""
        if next(self.ahead(), None) is not unit:
            self.expected = []
        self.seen.append(unit)

    def ahead(self) -> Iterator[Unit]:
        """The units that are expected next."""
        yield from self.expected[len(self.seen) :]
