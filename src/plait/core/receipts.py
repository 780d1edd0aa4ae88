"""What a message says besides its content: that its sender has come to the place in its line where it was sent.

    rank 0   ... SEND_F0  ...  F3 SEND_F3 ...            F3 was sent after B0 had run on rank 0, and B0 needed what
    rank 1   ... B0 SEND_B0 ... fetch F3                 rank 1 had sent: so SEND_B0 has arrived, and its memory is free

So a rank may let go of what it sent without asking, and without waiting for it.
"""

from __future__ import annotations

from plait.core.actions import PASSES, Kind, Schedule, ends, owners

Key = tuple[str, int, int]
"""A message: ``F`` or ``B``, the stage that needs it, and the microbatch."""

SENDS = {Kind.SEND_F: "F", Kind.SEND_B: "B"}


def receipts(schedule: Schedule, rank: int) -> dict[Key, tuple[Key, ...]]:
    """By every message that a rank receives: its own messages that have certainly arrived when that one has.

    Args:
        schedule: with its messages.
    """
    owner = owners(schedule)
    found: dict[Key, tuple[Key, ...]] = {}
    for other, line in enumerate(schedule):
        used: list[Key] = []
        for action in line if other != rank else ():
            stage, microbatch = action.stage, action.microbatch
            if action.kind in PASSES and action.kind is not Kind.WEIGHT:
                way, source = ("F", stage - 1) if action.kind is Kind.FORWARD else ("B", stage + 1)
                if owner.get(source) == rank:
                    used.append((way, stage, microbatch))
            for part in action.parts:
                if part.kind in SENDS and owner[ends(part)[1]] == rank:
                    found[SENDS[part.kind], ends(part)[1], part.microbatch] = tuple(used)
                    used = []
    return found
