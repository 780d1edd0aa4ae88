"""What passes add to an order, proved: messages, and the actions of (sharded) data parallelism.

0F0  0SEND_F0                a message has two sides: behind what makes it, before what needs it
     1RECV_F0  1F0
0F0 0SEND_F0 0F1 0SEND_F1    and between two ranks the order of receives is the order of sends
0UNSHARD 0F0 0B0 0RESHARD    a pass that reads parameters stands between the two
0B0 0REDUCE_GRAD0            a gradient is reduced when it is there, a stage when all of them are
"""

from __future__ import annotations

from collections import defaultdict

from plait.schedule.actions import (
    ADDS_GRADIENTS,
    MESSAGES,
    READS_PARAMETERS,
    SENDS,
    Action,
    Kind,
    Schedule,
    awaits,
    carries,
    makes,
)
from plait.schedule.grid import Place, refusal

# ---- messages ---------------------------------------------------------------------------------------------


def check_messages(schedule: Schedule, places: dict[Action, Place], owner: dict[int, int]) -> None:
    """Each message has two sides, behind what makes it and before what needs it, and no message is too many."""
    reader = {awaits(action, 1 + max(owner)): action for action in places}
    wanted: dict[Action, tuple[Action, int]] = {}  # message -> the pass beside it, and 1 where that comes first
    for action in places:
        value, rank = makes(action), owner[action.stage]
        if value is not None and owner.get(value.target, rank) != rank:
            wanted[value.send] = (action, 1)
            wanted[value.receive] = (reader[value], -1)
    for message, (beside, sign) in wanted.items():
        at = places[beside]
        if message not in places:
            raise refusal(schedule, f"{message} is missing beside {beside} on rank {at[0]}", [at])
        if (places[message][1] - at[1]) * sign < 0:
            text = f"{message} is out of order: it stands {'before' if sign > 0 else 'after'} {beside}"
            raise refusal(schedule, text, [places[message], at])
    for action, place in places.items():
        if action.kind in MESSAGES and action not in wanted:
            raise refusal(schedule, f"{action} has nobody on the other side: its stages are on one rank", [place])
    _check_channels(schedule, owner)


def _check_channels(schedule: Schedule, owner: dict[int, int]) -> None:
    """Messages between two ranks are received in the order in which they are sent."""
    Sides = dict[tuple[int, int], list[tuple[Action, Place]]]
    sent: Sides = defaultdict(list)
    received: Sides = defaultdict(list)
    for rank, line in enumerate(schedule):
        for index, action in enumerate(line):
            for part in action.parts if action.kind in MESSAGES else ():
                value = carries(part)
                side = sent if part.kind in SENDS else received
                side[owner[value.stage], owner[value.target]].append((part, (rank, index)))
    for (a, b), sends in sent.items():
        for (send, at), (receive, there) in zip(sends, received[a, b], strict=True):
            if carries(send) != carries(receive):
                raise refusal(
                    schedule,
                    f"messages from rank {a} to rank {b} are crossed: rank {a} sends {send} where rank {b} receives "
                    f"{receive}; transports match them by order",
                    [at, there],
                )


# ---- data parallelism -------------------------------------------------------------------------------------


def check_data_parallel(
    schedule: Schedule, places: dict[Action, Place], num_stages: int, num_microbatches: int
) -> None:
    """Passes on unsharded stages only; each gradient reduced once, after it is there, and each stage updated once."""
    kinds = {action.kind for action in places}
    gathers = bool(kinds & {Kind.UNSHARD, Kind.RESHARD})
    for rank, line in enumerate(schedule):
        unsharded: set[int] = set()
        for index, action in enumerate(line):
            s, here = action.stage, (rank, index)
            if action.kind is Kind.UNSHARD:
                if s in unsharded:
                    raise refusal(schedule, f"{action} is doubled: stage {s} is unsharded already", [here])
                unsharded.add(s)
            elif action.kind is Kind.RESHARD:
                if s not in unsharded:
                    raise refusal(schedule, f"{action} is doubled: stage {s} is not unsharded", [here])
                unsharded.remove(s)
            elif action.kind in READS_PARAMETERS and gathers and s not in unsharded:
                raise refusal(schedule, f"{action} is out of order: stage {s} is not unsharded here", [here])
            elif action.kind in (Kind.REDUCE, Kind.UPDATE):
                _check_last(schedule, places, action, here, num_microbatches)
        if unsharded:
            raise refusal(schedule, f"{min(unsharded)}RESHARD is missing on rank {rank}", [(rank, len(line))])
    for stage in range(num_stages):
        wanted = [Action(kind, stage) for kind in (Kind.REDUCE, Kind.UPDATE) if kind in kinds]
        if Kind.REDUCE_GRAD in kinds:
            wanted += [Action(Kind.REDUCE_GRAD, stage, m) for m in range(num_microbatches)]
        for action in wanted:
            if action not in places:
                rank = places[Action(Kind.FORWARD, stage, 0)][0]
                raise refusal(schedule, f"{action} is missing on rank {rank}", [(rank, len(schedule[rank]))])
            for kind in ADDS_GRADIENTS if action.kind is Kind.REDUCE_GRAD else ():
                maker = places.get(Action(kind, stage, action.microbatch), (0, -1))
                if maker[1] > places[action][1]:
                    text = f"{action} is out of order: its gradient comes later"
                    raise refusal(schedule, text, [places[action], maker])


def _check_last(
    schedule: Schedule, places: dict[Action, Place], action: Action, here: Place, num_microbatches: int
) -> None:
    """A stage is reduced after its last gradient, and updated after its reduction."""
    before = [Action(Kind.REDUCE, action.stage)] if action.kind is Kind.UPDATE else []
    kinds = (Kind.BACKWARD, Kind.WEIGHT, Kind.REDUCE_GRAD)
    before += [Action(kind, action.stage, m) for m in range(num_microbatches) for kind in kinds]
    for earlier in before:
        if earlier in places and places[earlier][1] > here[1]:
            raise refusal(schedule, f"{action} is out of order: {earlier} comes later", [here, places[earlier]])
