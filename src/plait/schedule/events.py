"""What happened: the log of one step, action by action, on the clock that ``simulate`` predicts.

Every rank writes one ``Event`` per action, in order.  Times are seconds since all ranks agreed on the counts of the
step, so the logs of several ranks (and hosts) fit together.  Waits for others (a message, a collective) are spans:

    rank 1   |  0F0 ............|####|      waits [0.00, 0.31) for the message, computes [0.31, 0.52)
"""

from dataclasses import dataclass

from plait.schedule.actions import Action


@dataclass(frozen=True)
class Span:
    """A wait for others within an action."""

    start: float
    end: float
    what: str
    """What was waited for, as errors would name it."""


@dataclass(frozen=True)
class Event:
    """One action as it was carried out."""

    action: Action
    start: float
    end: float
    waits: tuple[Span, ...] = ()
    """In order, not overlapping, within the event."""

    @property
    def busy(self) -> float:
        """Seconds of the action in which the rank did not wait for others."""
        return self.end - self.start - sum(span.end - span.start for span in self.waits)


Log = tuple[tuple[Event, ...], ...]
"""One step on all ranks of a pipeline, by rank."""
