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

from collections import defaultdict, deque
from dataclasses import dataclass

from plait.core.actions import PASSES, Action, Kind, Schedule, microbatches, owners
from plait.core.check_added import MESSAGE_KINDS, check_data_parallel, check_messages
from plait.core.grid import Key, Place, refusal, text_of


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
    num_stages = num_stages or max(owner, default=-1) + 1
    num_microbatches = num_microbatches or microbatches(a for line in schedule for a in line)
    if not num_stages or not num_microbatches:
        raise refusal(schedule, "the schedule is empty: it needs a stage and a microbatch", [])
    places = _places(schedule, owner)
    _check_complete(schedule, places, owner, num_stages, num_microbatches, backward=backward)
    _check_own_order(schedule, places, num_stages)
    with_messages = any(key[0] in MESSAGE_KINDS for key in places)
    if with_messages:
        check_messages(schedule, places, owner)
    check_data_parallel(schedule, places, num_stages, num_microbatches)
    _check_deadlock(schedule, places, num_stages, with_messages)
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
    found = []
    for line in schedule:
        held = most = 0
        for action in line:
            held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
            most = max(most, held)
        found.append(most)
    return tuple(found)


# ---- every action once ------------------------------------------------------------------------------------

_REPEATED = {Kind.UNSHARD, Kind.RESHARD}


def _places(schedule: Schedule, owner: dict[int, int]) -> dict[Key, Place]:
    """Where each action stands; a stage on two ranks and an action that stands twice are refused."""
    found: dict[Key, Place] = {}
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
                key = (part.kind.value, part.stage, part.microbatch)
                if key in found and part.kind not in _REPEATED:
                    raise refusal(schedule, f"{part} is doubled: it stands twice on rank {rank}", [found[key], here])
                found.setdefault(key, here)
    return found


def _check_complete(
    schedule: Schedule,
    places: dict[Key, Place],
    owner: dict[int, int],
    num_stages: int,
    num_microbatches: int,
    *,
    backward: bool,
) -> None:
    for stage in range(num_stages):
        if stage not in owner:
            raise refusal(schedule, f"stage {stage} of {num_stages} is missing: no rank works on it", [])
        for m in range(num_microbatches):
            has = {kind for kind in "FBIW" if (kind, stage, m) in places}
            if not backward and (surplus := min(has - {"F"}, default="")):
                where = [places[(surplus, stage, m)]]
                raise refusal(schedule, f"{stage}{surplus}{m} has no place here: there are forwards only", where)
            if "B" in has and has & {"I", "W"}:
                part = min(has & {"I", "W"})
                both = [places[("B", stage, m)], places[(part, stage, m)]]
                raise refusal(
                    schedule, f"{stage}{part}{m} is doubled: {stage}B{m} is the full backward and does it too", both
                )
            wanted = "FIW" if has & {"I", "W"} else "FB" if backward else "F"
            for kind in wanted:
                if kind not in has:
                    rank = owner[stage]
                    end = (rank, len(schedule[rank]))
                    raise refusal(schedule, f"{stage}{kind}{m} is missing on rank {rank}", [end])
    for stage in owner:
        if stage >= num_stages:
            raise refusal(schedule, f"stage {stage}: there are {num_stages}, counted from 0", [])
    if (most := max(m for kind, _, m in places if kind in "FBIW")) >= num_microbatches:
        raise refusal(schedule, f"microbatch {most}: there are {num_microbatches}, counted from 0", [])


# ---- dependencies -----------------------------------------------------------------------------------------


def needs(action: Action, num_stages: int) -> tuple[tuple[str, int], ...]:
    """What a pass needs of its microbatch, as (what, left behind by which stage).

    ``F`` is a stage's activation, ``G`` the gradient of its input.
    """
    s = action.stage
    if action.kind is Kind.FORWARD:
        return (("F", s - 1),) if s else ()
    if action.kind is Kind.WEIGHT:
        return (("G", s),)
    return (("F", s), ("G", s + 1)) if s + 1 < num_stages else (("F", s),)


def _maker(places: dict[Key, Place], what: str, stage: int, microbatch: int) -> Key:
    """Which pass leaves ``what`` behind."""
    if what == "G":
        what = "B" if ("B", stage, microbatch) in places else "I"
    return (what, stage, microbatch)


def _check_own_order(schedule: Schedule, places: dict[Key, Place], num_stages: int) -> None:
    """What a pass needs from its own rank stands before it."""
    for rank, line in enumerate(schedule):
        for index, action in enumerate(line):
            if action.kind not in PASSES:
                continue
            for what, stage in needs(action, num_stages):
                maker = _maker(places, what, stage, action.microbatch)
                where = places[maker]
                if where[0] == rank and where[1] > index:
                    raise refusal(
                        schedule,
                        f"{action} is out of order: it needs {text_of(maker)}, which comes later on rank {rank}",
                        [(rank, index), where],
                    )


# ---- deadlock ---------------------------------------------------------------------------------------------


def _check_deadlock(schedule: Schedule, places: dict[Key, Place], num_stages: int, with_messages: bool) -> None:
    """Carries the lines out, in any order that works; who is left waiting is in a deadlock."""
    at = [0] * len(schedule)
    waiting: dict[Place, list[int]] = defaultdict(list)
    blocked: dict[int, Key] = {}
    ready = deque(range(len(schedule)))

    def missing(rank: int, action: Action) -> Key | None:
        for what, stage in needs(action, num_stages) if action.kind in PASSES else ():
            maker = _maker(places, what, stage, action.microbatch)
            source = places[maker]
            if with_messages and source[0] != rank:
                maker = (f"SEND_{'F' if what == 'F' else 'B'}", stage, action.microbatch)
                source = places[maker]
            if source[1] >= at[source[0]]:
                return maker
        return None

    while ready:
        rank = ready.popleft()
        blocked.pop(rank, None)
        while at[rank] < len(schedule[rank]):
            lack = missing(rank, schedule[rank][at[rank]])
            if lack is not None:
                blocked[rank] = lack
                waiting[places[lack]].append(rank)
                break
            ready.extend(waiting.pop((rank, at[rank]), ()))
            at[rank] += 1
    if not blocked:
        return
    rank = min(blocked)
    round_: list[int] = []
    while rank not in round_:
        round_.append(rank)
        rank = places[blocked[rank]][0]
    round_ = round_[round_.index(rank) :]
    who = "; ".join(
        f"rank {r} waits at {schedule[r][at[r]]} for {text_of(blocked[r])} of rank {places[blocked[r]][0]}"
        for r in round_
    )
    raise refusal(schedule, f"deadlock: {who}", [(r, at[r]) for r in sorted(blocked)])


# ---- additions ---------------------------------------------------------------------------------------------


def _first_out_of_order(schedule: Schedule) -> tuple[Place, int] | None:
    """The first gradient that is added after one of a later microbatch, and that microbatch."""
    for rank, line in enumerate(schedule):
        latest: dict[int, int] = {}
        for index, action in enumerate(line):
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                if action.microbatch < latest.get(action.stage, -1):
                    return (rank, index), latest[action.stage]
                latest[action.stage] = action.microbatch
    return None
