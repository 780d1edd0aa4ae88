"""What passes add to an order, proved: messages, and the actions of (sharded) data parallelism.

0F0  0SEND_F0                a message has two sides: behind what makes it, before what needs it
     1RECV_F0  1F0
0F0 0SEND_F0 0F1 0SEND_F1    and between two ranks the order of receives is the order of sends
0UNSHARD 0F0 0B0 0RESHARD    a pass that reads parameters stands between the two
0B0 0REDUCE_GRAD0            a gradient is reduced when it is there, a stage when all of them are
"""

from __future__ import annotations

from collections import defaultdict

from plait.core.actions import MESSAGES, PASSES, Action, Kind, Schedule, ends
from plait.core.grid import Key, Place, refusal, text_of

MESSAGE_KINDS = {kind.value for kind in MESSAGES}

# ---- messages ---------------------------------------------------------------------------------------------


def check_messages(schedule: Schedule, places: dict[Key, Place], owner: dict[int, int]) -> None:
    """Each message has two sides, behind what makes it and before what needs it, and no message is too many."""
    passes = [key for key in places if key[0] in ("F", "B", "I")]
    wanted: dict[Key, tuple[Key, int]] = {}  # message -> the pass beside it, and 1 where that comes first
    for kind, s, m in passes:
        way, other = ("F", s + 1) if kind == "F" else ("B", s - 1)
        if other in owner and owner[other] != owner[s]:
            wanted[(f"SEND_{way}", s, m)] = ((kind, s, m), 1)
            reader = (way, other, m) if way == "F" or ("B", other, m) in places else ("I", other, m)
            wanted[(f"RECV_{way}", other, m)] = (reader, -1)
    for key, (beside, sign) in wanted.items():
        at = places[beside]
        if key not in places:
            raise refusal(schedule, f"{text_of(key)} is missing beside {text_of(beside)} on rank {at[0]}", [at])
        if (places[key][1] - at[1]) * sign < 0:
            word = "before" if sign > 0 else "after"
            raise refusal(
                schedule, f"{text_of(key)} is out of order: it stands {word} {text_of(beside)}", [places[key], at]
            )
    for key, place in places.items():
        if key[0] in MESSAGE_KINDS and key not in wanted:
            raise refusal(schedule, f"{text_of(key)} has nobody on the other side: its stages are on one rank", [place])
    _check_channels(schedule, owner)


def _check_channels(schedule: Schedule, owner: dict[int, int]) -> None:
    """Messages between two ranks are received in the order in which they are sent."""
    Sent = dict[tuple[int, int], list[tuple[tuple[int, int, int], Place, Action]]]
    sent: Sent = defaultdict(list)
    received: Sent = defaultdict(list)
    for rank, line in enumerate(schedule):
        for index, action in enumerate(line):
            if action.kind not in MESSAGES:
                continue
            for part in action.parts:
                source, target = ends(part)
                side = sent if part.kind in (Kind.SEND_F, Kind.SEND_B) else received
                message = (source, target, part.microbatch)
                side[(owner[source], owner[target])].append((message, (rank, index), part))
    for (a, b), sends in sent.items():
        for (left, at, send), (right, there, recv) in zip(sends, received[(a, b)], strict=True):
            if left != right:
                raise refusal(
                    schedule,
                    f"messages from rank {a} to rank {b} are crossed: rank {a} sends {send} where rank {b} receives "
                    f"{recv}; transports match them by order",
                    [at, there],
                )


# ---- data parallelism -------------------------------------------------------------------------------------


def check_data_parallel(schedule: Schedule, places: dict[Key, Place], num_stages: int, num_microbatches: int) -> None:
    """Passes on unsharded stages only; each gradient reduced once, after it is there, and each stage updated once."""
    kinds = {key[0] for key in places}
    gathers = bool(kinds & {"UNSHARD", "RESHARD"})
    for rank, line in enumerate(schedule):
        whole: set[int] = set()
        for index, action in enumerate(line):
            s, here = action.stage, [(rank, index)]
            if action.kind is Kind.UNSHARD:
                if s in whole:
                    raise refusal(schedule, f"{action} is doubled: stage {s} is unsharded already", here)
                whole.add(s)
            elif action.kind is Kind.RESHARD:
                if s not in whole:
                    raise refusal(schedule, f"{action} is doubled: stage {s} is not unsharded", here)
                whole.remove(s)
            elif action.kind in PASSES - {Kind.WEIGHT} and gathers and s not in whole:
                raise refusal(schedule, f"{action} is out of order: stage {s} is not unsharded here", here)
            elif action.kind in (Kind.REDUCE, Kind.UPDATE):
                _check_last(schedule, places, (rank, index), num_microbatches)
        if whole:
            raise refusal(schedule, f"{min(whole)}RESHARD is missing on rank {rank}", [(rank, len(line))])
    for stage in range(num_stages):
        wanted: list[Key] = [(kind, stage, -1) for kind in ("REDUCE", "UPDATE") if kind in kinds]
        wanted += [("REDUCE_GRAD", stage, m) for m in range(num_microbatches) if "REDUCE_GRAD" in kinds]
        for key in wanted:
            if key not in places:
                rank = places[("F", stage, 0)][0]
                name = text_of(key)
                raise refusal(schedule, f"{name} is missing on rank {rank}", [(rank, len(schedule[rank]))])
            if key[0] == "REDUCE_GRAD":
                maker = places.get(("B", stage, key[2]), places.get(("W", stage, key[2])))
                if maker is not None and maker[1] > places[key][1]:
                    raise refusal(
                        schedule, f"{text_of(key)} is out of order: its gradient comes later", [places[key], maker]
                    )


def _check_last(schedule: Schedule, places: dict[Key, Place], here: Place, num_microbatches: int) -> None:
    """A stage is reduced after its last gradient, and updated after its reduction."""
    action = schedule[here[0]][here[1]]
    before = [("REDUCE", action.stage, -1)] if action.kind is Kind.UPDATE else []
    before += [(kind, action.stage, m) for m in range(num_microbatches) for kind in ("B", "W", "REDUCE_GRAD")]
    for key in before:
        if key in places and places[key][1] > here[1]:
            name = text_of(key)
            raise refusal(schedule, f"{action} is out of order: {name} comes later", [here, places[key]])
