"""A schedule is proved before a process starts: one that passes here cannot hang, and computes what it should.

    every pass once          F, and B or I + W, of each microbatch on each stage; one rank owns a stage
    dependencies             F after F of the stage before;  B, I after F, and after B or I of the next stage;
                             W after I
    messages                 each is sent and received once; between two ranks they are received in the order in
                             which they are sent, because transports match them by order
    data parallelism         passes on unsharded stages only; every gradient reduced once
    no deadlock              lines are carried out in order; nothing waits but a pass, for what it needs
    additions                gradients of a stage are added in the order of microbatches (only if asked)

A failure prints the schedule as a grid in which the failing cell is marked:

    deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0
    rank 0 |  0F0  >0B0<  0F1   0B1
    rank 1 |  1F0  >1F1<  1B0   1B1
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from plait.schedule.actions import (
    ADDS_GRADIENTS,
    MESSAGES,
    PASSES,
    Action,
    Kind,
    Schedule,
    Value,
    activations,
    count_microbatches,
    count_stages,
    makes,
    needs,
    owners,
)
from plait.schedule.check_messages import check_data_parallel, check_messages
from plait.schedule.grid import Place, refusal
from plait.schedule.walk import walk


@dataclass(frozen=True)
class Proof:
    """What ``check`` found out on its way."""

    num_stages: int
    num_microbatches: int
    owner: tuple[int, ...]
    """The rank of each stage."""
    peaks: tuple[int, ...]
    """Per rank, the most activations it holds at once: pairs of stage and microbatch, from F until B or W."""
    in_order: bool
    """Whether each stage adds its gradients in the order of microbatches."""


def check(
    schedule: Schedule,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    in_order: bool = False,
    backward: bool = True,
) -> Proof:
    """Proves a schedule, with or without messages and the actions of sharded data parallelism.

    Args:
        num_stages: how many stages there must be; else as many as the schedule names.
        num_microbatches: the same of microbatches.
        in_order: refuse a schedule that adds the gradients of a stage in another order than that of microbatches.
        backward: whether every forward has its backward; an evaluation has none.

    Raises:
        ValueError: what is wrong (missing, doubled, out of order, a deadlock and who waits for whom), and where.
    """
    owner = owners(schedule)
    num_stages = num_stages or count_stages(schedule)
    num_microbatches = num_microbatches or count_microbatches(schedule)
    if not num_stages or not num_microbatches:
        raise refusal(schedule, "the schedule is empty: it needs a stage and a microbatch", [])
    places = _places(schedule, owner)
    _check_complete(schedule, places, owner, num_stages, num_microbatches, backward=backward)
    made_by = {value: action for action in places if (value := makes(action)) is not None}
    _check_own_order(schedule, places, made_by, num_stages)
    with_messages = any(action.kind in MESSAGES for action in places)
    if with_messages:
        check_messages(schedule, places, owner)
    check_data_parallel(schedule, places, num_stages, num_microbatches)
    _check_deadlock(schedule, places, made_by, num_stages, with_messages)
    first = _first_out_of_order(schedule)
    if in_order and first is not None:
        place, late = first
        action = schedule[place[0]][place[1]]
        raise refusal(
            schedule,
            f"{action} adds its gradient after that of microbatch {late}: out of order (gradients are to be added in "
            f"the order of microbatches)",
            [place],
        )
    ranks = tuple(owner[s] for s in range(num_stages))
    return Proof(num_stages, num_microbatches, ranks, peaks(schedule), first is None)


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations that it holds at once; they depend on its line alone."""
    return tuple(max(accumulate(map(activations, line), initial=0)) for line in schedule)


# ---- every action once ------------------------------------------------------------------------------------


def _places(schedule: Schedule, owner: dict[int, int]) -> dict[Action, Place]:
    """Where each action stands; a stage on two ranks and an action that stands twice are refused."""
    places: dict[Action, Place] = {}
    for rank, line in enumerate(schedule):
        for index, action in enumerate(line):
            for part in action.parts:
                here = (rank, index)
                if owner[part.stage] != rank:
                    raise refusal(
                        schedule,
                        f"{part} stands on rank {rank}, but stage {part.stage} belongs to rank {owner[part.stage]}: "
                        f"a stage has one rank",
                        [here],
                    )
                first = places.setdefault(part, here)
                if first is not here and part.kind not in (Kind.UNSHARD, Kind.RESHARD):
                    raise refusal(schedule, f"{part} is doubled: it stands twice on rank {rank}", [first, here])
    return places


def _check_complete(
    schedule: Schedule,
    places: dict[Action, Place],
    owner: dict[int, int],
    num_stages: int,
    num_microbatches: int,
    *,
    backward: bool,
) -> None:
    """Each stage has a rank, each microbatch its passes on it, and there is no other stage or microbatch."""
    for stage in range(num_stages):
        if stage not in owner:
            raise refusal(schedule, f"stage {stage} of {num_stages} is missing: no rank works on it", [])
        for m in range(num_microbatches):
            forward, full, input_part, weight_part = (
                Action(kind, stage, m) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
            )
            parts = [part for part in (input_part, weight_part) if part in places]
            for action in (full, input_part, weight_part) if not backward else ():
                if action in places:
                    text = f"{action} has no place here: there are forwards only"
                    raise refusal(schedule, text, [places[action]])
            if full in places and parts:
                text = f"{parts[0]} is doubled: {full} is the full backward and does it too"
                raise refusal(schedule, text, [places[full], places[parts[0]]])
            for action in (forward, *((input_part, weight_part) if parts else (full,) if backward else ())):
                if action not in places:
                    rank = owner[stage]
                    raise refusal(schedule, f"{action} is missing on rank {rank}", [(rank, len(schedule[rank]))])
    for stage in owner:
        if stage >= num_stages:
            raise refusal(schedule, f"stage {stage}: there are {num_stages}, counted from 0", [])
    if (most := max(action.microbatch for action in places if action.kind in PASSES)) >= num_microbatches:
        raise refusal(schedule, f"microbatch {most}: there are {num_microbatches}, counted from 0", [])


# ---- dependencies -----------------------------------------------------------------------------------------


def _check_own_order(
    schedule: Schedule, places: dict[Action, Place], made_by: dict[Value, Action], num_stages: int
) -> None:
    """What a pass needs from its own rank stands before it."""
    for rank, line in enumerate(schedule):
        for index, action in enumerate(line):
            for value in needs(action, num_stages):
                where = places[made_by[value]]
                if where[0] == rank and where[1] > index:
                    raise refusal(
                        schedule,
                        f"{action} is out of order: it needs {made_by[value]}, which comes later on rank {rank}",
                        [(rank, index), where],
                    )


# ---- deadlock ---------------------------------------------------------------------------------------------


def _check_deadlock(
    schedule: Schedule,
    places: dict[Action, Place],
    made_by: dict[Value, Action],
    num_stages: int,
    with_messages: bool,
) -> None:
    """Carries the lines out, in any order that works; who is left waiting is in a deadlock."""
    done: set[Action] = set()

    def lacks(rank: int, action: Action) -> Action | None:
        for value in needs(action, num_stages):
            maker = made_by[value]
            awaited = value.send if with_messages and places[maker][0] != rank else maker
            if awaited not in done:
                return awaited
        return None

    def does(rank: int, action: Action) -> tuple[Action, ...]:
        done.update(action.parts)
        return action.parts

    stuck = walk(schedule, lacks, does)
    if not stuck:
        return
    rank = min(stuck)
    circle: list[int] = []
    while rank not in circle:
        circle.append(rank)
        rank = places[stuck[rank][1]][0]
    who = []
    for r in circle[circle.index(rank) :]:
        index, awaited = stuck[r]
        who.append(f"rank {r} waits at {schedule[r][index]} for {awaited} of rank {places[awaited][0]}")
    marked = [(rank, index) for rank, (index, _) in sorted(stuck.items())]
    raise refusal(schedule, f"deadlock: {'; '.join(who)}", marked)


# ---- additions ---------------------------------------------------------------------------------------------


def _first_out_of_order(schedule: Schedule) -> tuple[Place, int] | None:
    """The first gradient that is added after one of a later microbatch, and that microbatch."""
    for rank, line in enumerate(schedule):
        latest: dict[int, int] = {}
        for index, action in enumerate(line):
            if action.kind in ADDS_GRADIENTS:
                if action.microbatch < latest.get(action.stage, -1):
                    return (rank, index), latest[action.stage]
                latest[action.stage] = action.microbatch
    return None
