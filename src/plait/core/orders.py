"""Orders of work: small pure functions that write schedules.

No pipeline is one stage: a plain data-parallel run is the schedule below, on every rank alike.
"""

from __future__ import annotations

from plait.core.actions import Action, Kind, Schedule


def one_stage(num_microbatches: int, num_ranks: int = 1) -> Schedule:
    """Forward and backward of each microbatch in turn, then one reduction and one update.

    Raises:
        ValueError: no microbatch at all.
    """
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches: a step needs at least one")
    passes = [Action(kind, 0, m) for m in range(num_microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    line = (*passes, Action(Kind.REDUCE, 0), Action(Kind.UPDATE, 0))
    return (line,) * num_ranks
