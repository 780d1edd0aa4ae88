"""Numbers that the members of a group report to each other: one ``post`` for each number, and a reader counts them."""

from __future__ import annotations

from collections.abc import Iterable

from plait.shared_memory.semaphore import Semaphore


class Bells:
    """One kind of report, seen from one rank.

    Args:
        mine: the semaphores by which this rank reports, by the ranks that hear them.
        theirs: those by which the others report, by rank; one that is missing is silent.
        others: all other ranks.
    """

    def __init__(self, mine: dict[int, Semaphore], theirs: dict[int, Semaphore], others: Iterable[int]) -> None:
        self.mine, self.theirs = mine, theirs
        self._told, self._heard = 0, dict.fromkeys(others, 0)
        self._settled = 0
        """The last number that all others have reported."""

    def tell(self, number: int) -> Iterable[int]:
        """Reports all numbers up to this one; returns the ranks that it reports to."""
        missed, self._told = number - self._told, number
        for bell in self.mine.values() if missed else ():
            for _ in range(missed):
                bell.post()
        return self.mine if missed else ()

    def silent(self, number: int) -> list[int]:
        """Returns the ranks that have not reported a number yet."""
        if number <= self._settled:
            return []
        for rank, bell in self.theirs.items():
            while self._heard[rank] < number and bell.take():
                self._heard[rank] += 1
        missing = [rank for rank, heard in self._heard.items() if heard < number]
        self._settled = self._settled if missing else number
        return missing
