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

    rank 1 waits at 1F1 for 0F1, which comes after 0B0 on rank 0, which waits for 1B0 ...: deadlock
    rank 0 |   0F0  >0B0<   0F1    0B1
    rank 1 |   1F0  >1F1<   1B0    1B1
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from plait.core.actions import MESSAGES, PASSES, Action, Kind, Schedule, ends, microbatches, owners
from plait.core.grid import Place, grid

Key = tuple[str, int, int]
"""What a pass leaves behind: F an activation, G the gradient of its input, W those of its weights."""


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
    schedule: Schedule, *, num_stages: int | None = None, num_microbatches: int | None = None, in_order: bool = False
) -> Proof:
    """Proves a schedule, with or without messages and the actions of sharded data parallelism.

    Args:
        num_stages: how many stages there must be; else as many as the schedule names.
        num_microbatches: the same of microbatches.
        in_order: refuse a schedule that adds the gradients of a stage in another order than that of microbatches.

    Raises:
        ValueError: what is wrong (missing, doubled, out of order, a deadlock and who waits for whom), and where.
    """
    owner = owners(schedule)
    num_stages = num_stages or max(owner, default=-1) + 1
    num_microbatches = num_microbatches or microbatches(a for line in schedule for a in line)
    if not num_stages or not num_microbatches:
        raise refusal(schedule, "the schedule is empty: it needs a stage and a microbatch", [])
    places = _places(schedule, owner)
    _check_complete(schedule, places, owner, num_stages, num_microbatches)
    _check_own_order(schedule, places, num_stages)
    with_messages = any(key[0] in _MESSAGE_KINDS for key in places)
    if with_messages:
        _check_messages(schedule, places, owner)
    _check_data_parallel(schedule, places, num_stages, num_microbatches)
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


def refusal(schedule: Schedule, reason: str, marked: Iterable[Place]) -> ValueError:
    """The error with its reason and the schedule, the failing cells marked."""
    return ValueError(f"{reason}\n{grid(schedule, frozenset(marked))}")


# ---- every action once ------------------------------------------------------------------------------------

_MESSAGE_KINDS = {kind.value for kind in MESSAGES}
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
    schedule: Schedule, places: dict[Key, Place], owner: dict[int, int], num_stages: int, num_microbatches: int
) -> None:
    for stage in range(num_stages):
        if stage not in owner:
            raise refusal(schedule, f"stage {stage} of {num_stages} is missing: no rank works on it", [])
        for m in range(num_microbatches):
            has = {kind for kind in "FBIW" if (kind, stage, m) in places}
            if "B" in has and has & {"I", "W"}:
                part = min(has & {"I", "W"})
                both = [places[("B", stage, m)], places[(part, stage, m)]]
                raise refusal(
                    schedule, f"{stage}{part}{m} is doubled: {stage}B{m} is the full backward and does it too", both
                )
            wanted = "FIW" if has & {"I", "W"} else "FB"
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
    """What a pass needs, as (what is left behind, by which stage) of its microbatch: see ``Key``."""
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


def _text(key: Key) -> str:
    return f"{key[1]}{key[0]}{key[2]}"


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
                        f"{action} is out of order: it needs {_text(maker)}, which comes later on the same rank {rank}",
                        [(rank, index), where],
                    )


# ---- messages ---------------------------------------------------------------------------------------------


def _check_messages(schedule: Schedule, places: dict[Key, Place], owner: dict[int, int]) -> None:
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
            raise refusal(schedule, f"{_text(key)} is missing beside {_text(beside)} on rank {at[0]}", [at])
        if (places[key][1] - at[1]) * sign < 0:
            word = "before" if sign > 0 else "after"
            raise refusal(
                schedule, f"{_text(key)} is out of order: it stands {word} {_text(beside)}", [places[key], at]
            )
    for key, place in places.items():
        if key[0] in _MESSAGE_KINDS and key not in wanted:
            raise refusal(schedule, f"{_text(key)} has nobody on the other side: its stages are on one rank", [place])
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


def _check_data_parallel(schedule: Schedule, places: dict[Key, Place], num_stages: int, num_microbatches: int) -> None:
    kinds = {key[0] for key in places}
    gathered = {stage for kind, stage, _ in places if kind in ("UNSHARD", "RESHARD")}
    for rank, line in enumerate(schedule):
        whole: Counter[int] = Counter()
        for index, action in enumerate(line):
            s, here = action.stage, [(rank, index)]
            if action.kind is Kind.UNSHARD:
                if whole[s]:
                    raise refusal(schedule, f"{action} is doubled: stage {s} is unsharded already", here)
                whole[s] = 1
            elif action.kind is Kind.RESHARD:
                if not whole[s]:
                    raise refusal(schedule, f"{action} is doubled: stage {s} is not unsharded", here)
                whole[s] = 0
            elif action.kind in PASSES - {Kind.WEIGHT} and s in gathered and not whole[s]:
                raise refusal(schedule, f"{action} is out of order: stage {s} is not unsharded here", here)
            elif action.kind in (Kind.REDUCE, Kind.UPDATE):
                _check_last(schedule, places, (rank, index), num_microbatches)
    for stage in range(num_stages):
        wanted = [(kind, stage, -1) for kind in ("REDUCE", "UPDATE") if kind in kinds]
        wanted += [("REDUCE_GRAD", stage, m) for m in range(num_microbatches) if "REDUCE_GRAD" in kinds]
        for key in wanted:
            if key not in places:
                rank = places[("F", stage, 0)][0]
                name = _text(key).removesuffix("-1")
                raise refusal(schedule, f"{name} is missing on rank {rank}", [(rank, len(schedule[rank]))])
            if key[0] == "REDUCE_GRAD":
                maker = places.get(("B", stage, key[2]), places.get(("W", stage, key[2])))
                if maker is not None and maker[1] > places[key][1]:
                    raise refusal(
                        schedule, f"{_text(key)} is out of order: its gradient comes later", [places[key], maker]
                    )


def _check_last(schedule: Schedule, places: dict[Key, Place], here: Place, num_microbatches: int) -> None:
    """A stage is reduced after its last gradient, and updated after its reduction."""
    action = schedule[here[0]][here[1]]
    before = [("REDUCE", action.stage, -1)] if action.kind is Kind.UPDATE else []
    before += [(kind, action.stage, m) for m in range(num_microbatches) for kind in ("B", "W", "REDUCE_GRAD")]
    for key in before:
        if key in places and places[key][1] > here[1]:
            name = _text(key).removesuffix("-1")
            raise refusal(schedule, f"{action} is out of order: {name} comes later", [here, places[key]])


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
        f"rank {r} waits at {schedule[r][at[r]]} for {_text(blocked[r])} of rank {places[blocked[r]][0]}" for r in round_
    )
    raise refusal(schedule, f"deadlock: {who}", [(r, at[r]) for r in sorted(blocked)])
