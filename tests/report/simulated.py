"""A simulated step as a log, for tests of what is made from logs."""

from itertools import accumulate
from math import inf

from plait.schedule.actions import Event, Log, Span
from plait.schedule.simulate import Timeline


def as_log(timeline: Timeline) -> Log:
    """Turns a simulated step into the log that its ranks would have written.

    A rank begins an action when the previous one is done, and waits in it until it starts.  An action that overlaps
    computation (``Costs.overlap``) takes only as much of the line as it delays it.
    """
    log = []
    for rank, starts in enumerate(timeline.starts):
        events, now = [], 0.0
        next_starts = [*accumulate(reversed(starts), min, initial=inf)][-2::-1]  # the first start of later events
        for (action, start, end), latest in zip(timeline.line(rank), next_starts, strict=True):
            stop = min(end, latest)
            begin = min(start, stop)
            waits = (Span(now, begin, f"what {action} needs"),) if begin > now else ()
            events.append(Event(action, now, stop, waits))
            now = stop
        log.append(tuple(events))
    return tuple(log)
