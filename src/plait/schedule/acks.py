"""What a message says besides its content: that its sender has come to the place in its line where it was sent.

    rank 0   ... SEND_F0  ...  F3 SEND_F3 ...            F3 was sent after B0 had run on rank 0, and B0 needed what
    rank 1   ... B0 SEND_B0 ... fetch F3                 rank 1 had sent: so SEND_B0 has arrived, and its memory is free

So a rank may free what it sent without asking, and without waiting for it.
"""

from plait.schedule.actions import MESSAGES, SENDS, Schedule, awaits, carries, count_stages, owners

Key = tuple[str, int, int]
"""A message: ``F`` or ``B``, the stage that needs it, and the microbatch."""


def acks(schedule: Schedule, rank: int) -> dict[Key, tuple[Key, ...]]:
    """By every message that a rank receives in a schedule: its own that have certainly arrived when that one has."""
    owner, num_stages = owners(schedule), count_stages(schedule)
    arrived: dict[Key, tuple[Key, ...]] = {}
    for other, line in enumerate(schedule):
        used: list[Key] = []
        for action in line if other != rank else ():
            if (needed := awaits(action, num_stages)) and owner.get(needed.stage) == rank:
                used.append((needed.way, needed.target, needed.microbatch))
            for message in action.parts if action.kind in MESSAGES else ():
                sent = carries(message)
                if message.kind in SENDS and owner[sent.target] == rank:
                    arrived[sent.way, sent.target, sent.microbatch] = tuple(used)
                    used = []
    return arrived
