"""Proves a schedule before a process starts: a schedule that passes cannot hang, and is complete.

    every pass once          F, and B or I + W, of each microbatch on each stage; one rank owns a stage
    dependencies             F after F of the stage before;  B, I after F, and after B or I of the next stage;
                             W after I
    messages                 each is sent and received once; between two ranks they are received in the order in
                             which they are sent, because transports match them by order
    data parallelism         passes on unsharded stages only; every gradient reduced once
    no deadlock              lines are carried out in order; only passes wait, for the values they need
    additions                gradients of a stage are added in the order of microbatches (only if asked)

A failure prints the schedule as a grid with the failing cells marked:

    deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0
    rank 0 |  0F0  >0B0<  0F1   0B1
    rank 1 |  1F0  >1F1<  1B0   1B1
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from plait.schedule.actions import (
    ADDS_GRADIENTS,
    MESSAGES,
    READS_PARAMETERS,
    SENDS,
    Action,
    Kind,
    Schedule,
    Value,
    activations,
    awaits,
    carries,
    check_written,
    count_microbatches,
    count_stages,
    makes,
    needs,
    owners,
    placed,
    walk,
)

Place = tuple[int, int]
"""A rank, and an index in its line."""
Places = dict[Action, Place]
MOST_COLUMNS, MOST_RANKS = 16, 16
"""The error for a large schedule shows only the neighbourhood of the first mark."""


@dataclass(frozen=True)
class Proof:
    """The facts that ``check`` finds along the way."""

    num_stages: int
    num_microbatches: int
    owner: tuple[int, ...]
    """The rank of each stage."""
    peaks: tuple[int, ...]
    """For each rank, the most activations that it has at once: pairs of stage and microbatch, from F until B or W."""
    in_order: bool
    """True if each stage adds its gradients in the order of microbatches."""


def check(
    schedule: Schedule,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    in_order: bool = False,
    backward: bool = True,
) -> Proof:
    """Proves a schedule, with or without messages and the actions of sharded data parallelism.

    Raises ValueError with the fault (missing, doubled, out of order, a deadlock and its waits) and its place.

    Args:
        num_stages, num_microbatches: the required numbers; by default the numbers that the schedule names.
        in_order: refuse a schedule that adds a stage's gradients in any order but that of the microbatches.
        backward: True if every forward has its backward; an evaluation has none.
    """
    owner = owners(schedule)
    num_stages = num_stages or count_stages(schedule)
    num_microbatches = num_microbatches or count_microbatches(schedule)
    if not num_stages or not num_microbatches:
        raise refusal(schedule, "the schedule is empty: it needs a stage and a microbatch")
    check_written(num_stages, num_microbatches)
    places = _places(schedule, owner, num_stages, num_microbatches)
    _check_complete(schedule, places, owner, num_stages, num_microbatches, backward=backward)
    _check_messages(schedule, places, owner)
    _check_sharding(schedule)
    _check_deadlock(schedule, places, owner)
    late = late_gradient(schedule)
    if in_order and late is not None:
        raise late
    return Proof(num_stages, num_microbatches, tuple(owner.values()), peaks(schedule), late is None)


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most activations that it has at once."""
    return tuple(max(accumulate(map(activations, line), initial=0)) for line in schedule)


# ---- every action once ------------------------------------------------------------------------------------


def _places(schedule: Schedule, owner: dict[int, int], num_stages: int, num_microbatches: int) -> Places:
    """Returns the first place of each action; only gathers and reshards may occur twice."""
    places: Places = {}
    for action, here in placed(schedule):
        stage, m, rank = action.stage, action.microbatch, here[0]
        if stage >= num_stages:
            raise refusal(schedule, f"stage {stage}: there are {num_stages}, counted from 0", here)
        if m >= num_microbatches:
            raise refusal(schedule, f"microbatch {m}: there are {num_microbatches}, counted from 0", here)
        if owner[stage] != rank:
            text = f"stage {stage} belongs to rank {owner[stage]}: a stage has one rank"
            raise refusal(schedule, f"{action} is on rank {rank}, but {text}", here)
        first = places.setdefault(action, here)
        if first is not here and action.kind not in (Kind.UNSHARD, Kind.RESHARD):
            raise refusal(schedule, f"{action} is doubled: it is twice on rank {rank}", first, here)
    return places


def _check_complete(
    schedule: Schedule, places: Places, owner: dict[int, int], num_stages: int, num_microbatches: int, *, backward: bool
) -> None:
    """Checks that each stage has a rank, each microbatch its passes, and all stages the same kinds of actions."""
    kinds = {action.kind for action in places}
    for stage in range(num_stages):
        if stage not in owner:
            raise refusal(schedule, f"stage {stage} of {num_stages} is missing: no rank works on it")
        wanted = [Action(kind, stage) for kind in (Kind.REDUCE, Kind.UPDATE) if kind in kinds]
        for m in range(num_microbatches):
            full, *parts = (Action(kind, stage, m) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))
            part = next((part for part in parts if part in places), None)
            if not backward and (surplus := full if full in places else part) is not None:
                raise refusal(schedule, f"{surplus} has no place here: there are forwards only", places[surplus])
            if full in places and part is not None:
                text = f"{part} is doubled: {full} is the full backward and does it too"
                raise refusal(schedule, text, places[full], places[part])
            wanted.append(Action(Kind.FORWARD, stage, m))
            if backward:
                wanted += [full] if part is None else parts
            if Kind.REDUCE_GRAD in kinds:
                wanted.append(Action(Kind.REDUCE_GRAD, stage, m))
        for action in wanted:
            if action not in places:
                rank = owner[stage]
                raise refusal(schedule, f"{action} is missing on rank {rank}", (rank, len(schedule[rank])))


# ---- messages ---------------------------------------------------------------------------------------------


def _check_messages(schedule: Schedule, places: Places, owner: dict[int, int]) -> None:
    """Checks messages, if there are any: each has two sides, after the pass that makes it and before the one that needs
    it, and none is superfluous; between two ranks the order of receives is the order of sends."""
    channels: dict[tuple[int, int], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for action, place in places.items():
        if action.kind in MESSAGES:
            value = carries(action)
            source, target = owner.get(value.stage), owner.get(value.target)
            if source is None or target is None or source == target:
                raise refusal(schedule, f"{action} has no other side: its stages are on one rank", place)
            channels[source, target][action.kind not in SENDS].append(action)
    for action, at in places.items() if channels else ():
        for is_sent, crossing in ((True, makes(action)), (False, awaits(action, len(owner)))):
            if crossing is None or owner.get(crossing.target, at[0]) == owner[crossing.stage]:
                continue
            message = crossing.send if is_sent else crossing.receive
            if message not in places:
                raise refusal(schedule, f"{message} is missing next to {action} on rank {at[0]}", at)
            if (at < places[message]) != is_sent:
                text = f"{message} is out of order: it is {'before' if is_sent else 'after'} {action}"
                raise refusal(schedule, text, places[message], at)
    for (a, b), (sends, receives) in channels.items():
        for send, receive in zip(sends, receives, strict=True):
            if carries(send) != carries(receive):
                text = f"rank {a} sends {send} where rank {b} receives {receive}; transports match them by order"
                text = f"messages from rank {a} to rank {b} are crossed: {text}"
                raise refusal(schedule, text, places[send], places[receive])


# ---- sharded data parallelism -----------------------------------------------------------------------------

_LATER = {
    **dict.fromkeys(ADDS_GRADIENTS, (Kind.REDUCE_GRAD, Kind.REDUCE, Kind.UPDATE)),
    Kind.REDUCE_GRAD: (Kind.REDUCE, Kind.UPDATE),
    Kind.REDUCE: (Kind.UPDATE,),
}
"""The kinds that may only come after another action: of its microbatch, or once per step."""


def _check_sharding(schedule: Schedule) -> None:
    """Checks that passes run on unsharded stages, and that reductions and updates follow the work that they need."""
    gathers = any(action.kind in (Kind.UNSHARD, Kind.RESHARD) for line in schedule for action in line)
    for rank, line in enumerate(schedule):
        unsharded: set[int] = set()
        seen: dict[tuple[Kind, int, int], int] = {}
        for index, action in enumerate(line):
            kind, stage, here = action.kind, action.stage, (rank, index)
            if kind in (Kind.UNSHARD, Kind.RESHARD):
                if (stage in unsharded) == (kind is Kind.UNSHARD):
                    state = "unsharded already" if stage in unsharded else "not unsharded"
                    raise refusal(schedule, f"{action} is doubled: stage {stage} is {state}", here)
                unsharded ^= {stage}
            elif gathers and kind in READS_PARAMETERS and stage not in unsharded:
                raise refusal(schedule, f"{action} is out of order: stage {stage} is not unsharded here", here)
            for later in _LATER.get(kind, ()):
                early = seen.get((later, stage, action.microbatch if later is Kind.REDUCE_GRAD else -1))
                if early is not None:
                    text = f"{line[early]} is out of order: {action} comes later"
                    raise refusal(schedule, text, (rank, early), here)
            seen[kind, stage, action.microbatch] = index
        if unsharded:
            raise refusal(schedule, f"{min(unsharded)}RESHARD is missing on rank {rank}", (rank, len(line)))


# ---- deadlock ---------------------------------------------------------------------------------------------


def _check_deadlock(schedule: Schedule, places: Places, owner: dict[int, int]) -> None:
    """Carries the lines out in a possible order; a rank left waiting is in a deadlock, or its order is wrong."""
    with_messages = any(action.kind in MESSAGES for action in places)
    there: set[tuple[Value, bool]] = set()  # what was made; True where it was sent

    def attempt(rank: int, action: Action) -> tuple[tuple[Value, bool] | None, list[tuple[Value, bool]]]:
        for value in needs(action, len(owner)):
            wanted = value, with_messages and owner[value.stage] != rank
            if wanted not in there:
                return wanted, []
        made = makes(action)
        new = [(made, False)] if made is not None else [(carries(action), True)] if action.kind in SENDS else []
        there.update(new)
        return None, new

    stuck = walk(schedule, attempt)
    if not stuck:
        return
    made_by = {makes(action): action for action in places}
    at = {rank: schedule[rank][index] for rank, (index, _) in stuck.items()}
    awaited = {rank: value.send if sent else made_by[value] for rank, (_, (value, sent)) in stuck.items()}
    rank = min(stuck)
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        rank = places[awaited[rank]][0]
    circle = chain[chain.index(rank) :]
    if len(circle) == 1:
        text = f"it needs {awaited[rank]}, which comes later on rank {rank}"
        raise refusal(schedule, f"{at[rank]} is out of order: {text}", places[at[rank]], places[awaited[rank]])
    who = [f"rank {r} waits at {at[r]} for {awaited[r]} of rank {places[awaited[r]][0]}" for r in circle]
    raise refusal(schedule, f"deadlock: {'; '.join(who)}", *(places[action] for action in at.values()))


# ---- additions ---------------------------------------------------------------------------------------------


def late_gradient(schedule: Schedule) -> ValueError | None:
    """Returns the error for the first gradient that is added after one of a later microbatch, if any."""
    latest: dict[int, int] = {}
    for action, place in placed(schedule):
        if action.kind in ADDS_GRADIENTS:
            before = latest.get(action.stage, -1)
            if action.microbatch < before:
                order = "out of order (gradients are to be added in the order of microbatches)"
                text = f"{action} adds its gradient after that of microbatch {before}: {order}"
                return refusal(schedule, text, place)
            latest[action.stage] = action.microbatch
    return None


# ---- the grid ----------------------------------------------------------------------------------------------


def refusal(schedule: Schedule, reason: str, *marked: Place) -> ValueError:
    """Returns the error with its reason and the schedule, with the failing cells marked."""
    return ValueError(f"{reason}\n{grid(schedule, frozenset(marked))}")


def grid(schedule: Schedule, marked: frozenset[Place] = frozenset()) -> str:
    """The schedule with the marked places between ``>`` and ``<``; a place past the end of a line shows ``>?<``."""
    columns = max([*map(len, schedule), *(index + 1 for _, index in marked)], default=0)
    rank, index = min(marked, default=(0, 0))
    left = max(0, min(index - MOST_COLUMNS // 2, columns - MOST_COLUMNS))
    top = max(0, min(rank - MOST_RANKS // 2, len(schedule) - MOST_RANKS))
    shown = range(left, min(columns, left + MOST_COLUMNS))
    rows = [[_cell(schedule, (r, i), marked) for i in shown] for r in range(top, min(len(schedule), top + MOST_RANKS))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]
    before, after = " ..." if left else "", " ..." if shown.stop < columns else ""
    lines = []
    for rank, row in enumerate(rows, start=top):
        cells = "".join(f" {cell:^{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"rank {rank:<{len(str(len(schedule)))}} |{before}{cells}{after}".rstrip())
    hidden = len(schedule) - len(rows)
    return "\n".join(lines + [f"({hidden} more ranks)"] * (hidden > 0))


def _cell(schedule: Schedule, place: Place, marked: frozenset[Place]) -> str:
    rank, index = place
    text = str(schedule[rank][index]) if index < len(schedule[rank]) else ""
    return f">{text or '?'}<" if place in marked else f" {text} "
