"""Passes over schedules (not forwards and backwards): each returns a more detailed schedule, ready for ``check``.

    1f1b on two ranks            0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1
    join_backward                0I0 0W0 becomes 0B0
    add_sharding(zero3)          0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD0 ... 0RESHARD
    add_step                     ... 0REDUCE 0UPDATE
    add_messages                 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...

``add_messages`` comes last, after the passes that add work to a line.  No order of messages can deadlock: they are
started and never waited for, so a rank only ever waits in a pass, for the values that the pass needs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from plait.schedule.actions import (
    ADDS_GRADIENTS,
    MESSAGES,
    PASSES,
    READS_PARAMETERS,
    Action,
    Kind,
    Schedule,
    Value,
    awaits,
    count_stages,
    in_flight,
    makes,
    owners,
    placed,
)
from plait.table.cells import Strategy

AHEAD = 4
"""Receives of a completed schedule are posted this many passes ahead.

A message that finds its receive posted is written at once.  Otherwise it is fetched later, by threads that compete with
the computation (with 1, zbv takes 4 % longer on two ranks and two cores over gloo).  It costs at most as many
activations."""


def join_backward(schedule: Schedule) -> Schedule:
    """Joins the two parts of a backward into a full one, which is cheaper, if one follows the other and no other rank
    waits for the first, so that nothing comes later than before."""
    owner, lines = owners(schedule), []
    for rank, line in enumerate(schedule):
        joined: list[Action] = []
        for action in line:
            here = owner.get(action.stage - 1, rank) == rank
            if action.kind is Kind.WEIGHT and here and joined[-1:] == [replace(action, kind=Kind.INPUT)]:
                action = replace(joined.pop(), kind=Kind.BACKWARD)
            joined.append(action)
        lines.append(tuple(joined))
    return tuple(lines)


def complete(schedule: Schedule, strategy: Strategy, *, hold: int | None = 1) -> Schedule:
    """Adds everything that a schedule lacks to run under a row; what it has stays as it is."""
    kinds = {action.kind for action, _ in placed(schedule)}
    if not kinds & {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}:
        schedule = add_sharding(schedule, strategy, hold=hold)
    schedule = add_step(schedule)
    return schedule if kinds & MESSAGES else add_messages(schedule, AHEAD)


# ---- sharded data parallelism -----------------------------------------------------------------------------


def check_hold(hold: int | None) -> None:
    """Refuses a negative number of stages."""
    if hold is not None and hold < 0:
        raise ValueError(f"hold is {hold}: give the number of stages that stay unsharded, from 0")


def add_sharding(schedule: Schedule, strategy: Strategy, *, hold: int | None = 1) -> Schedule:
    """Adds the actions of a row of the table: gathers, reshards, and reductions after a microbatch.

    A stage is gathered before a pass that reads its parameters.  It is freed after the pass, unless it is among the
    next ``hold`` stages that the rank needs, or the row keeps full parameters and a microbatch of the stage is between
    its forward and its backward.  With ``hold=None`` each unit of a stage is gathered around its own part of a pass:
    the least memory, and the most bytes.
    """
    check_hold(hold)
    gathers, keeps = bool(strategy.params.split) and hold is not None, not strategy.kept.split
    reduces = bool(strategy.grads.split)
    lines = []
    for line in schedule:
        added: list[Action] = []
        flying: Counter[int] = Counter()
        whole: set[int] = set()
        returns = {(a.stage, a.microbatch) for a in line if a.kind in (Kind.BACKWARD, Kind.INPUT)}
        coming = deque(action.stage for action in line if action.kind in READS_PARAMETERS)
        for action in line:
            stage, kind = action.stage, action.kind
            reads = gathers and kind in READS_PARAMETERS
            if reads and stage not in whole:
                added.append(Action(Kind.UNSHARD, stage))
                whole.add(stage)
            added.append(action)
            if reads:
                coming.popleft()
                flying[stage] += ((stage, action.microbatch) in returns) * in_flight(action)
                stay = _next_stages(coming, hold or 0)
                free = {s for s in whole if s not in stay and not (keeps and flying[s])}
                added += [Action(Kind.RESHARD, s) for s in sorted(free)]
                whole -= free
            if reduces and kind in ADDS_GRADIENTS:
                added.append(Action(Kind.REDUCE_GRAD, stage, action.microbatch))
        lines.append(tuple(added))
    return tuple(lines)


def _next_stages(coming: Iterable[int], number: int) -> set[int]:
    """Returns the first ``number`` different stages."""
    stages: set[int] = set()
    for stage in coming:
        if len(stages) == number:
            break
        stages.add(stage)
    return stages


def add_step(schedule: Schedule) -> Schedule:
    """Adds the missing end of a step: a stage is reduced once its last gradient is there; updates come at the end of
    the line, where the global norm is known."""
    kinds = {action.kind for action, _ in placed(schedule)}
    lines = []
    for line in schedule:
        last = {a.stage: i for i, a in enumerate(line) if a.kind in PASSES | {Kind.REDUCE_GRAD}}
        added: list[Action] = []
        for index, action in enumerate(line):
            added.append(action)
            if Kind.REDUCE not in kinds and last.get(action.stage) == index:
                added.append(Action(Kind.REDUCE, action.stage))
        if Kind.UPDATE not in kinds:
            added += [Action(Kind.UPDATE, stage) for stage in sorted(last)]
        lines.append(tuple(added))
    return tuple(lines)


# ---- messages ---------------------------------------------------------------------------------------------


def add_messages(schedule: Schedule, ahead: int = 1) -> Schedule:
    """Adds a send right after each pass whose result another rank needs, and the receive before the pass that needs it.

    A receive is posted ``ahead`` passes before the one that needs it, so that the message travels while the rank
    computes.  Between two ranks receives are posted in the order of the sends, because transports match messages by
    order; if the receiver needs them in another order, some are posted even earlier.
    """
    owner, num_stages = owners(schedule), count_stages(schedule)
    passes = tuple(tuple(action for action in line if action.kind in PASSES) for line in schedule)
    needed_at = {awaits(action, num_stages): index for line in passes for index, action in enumerate(line)}
    sends: dict[Action, Action] = {}
    channels: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for rank, line in enumerate(passes):
        for action in line:
            value = makes(action)
            if value is None or owner.get(value.target, rank) == rank:
                continue
            if value not in needed_at:
                raise ValueError(f"{action} has no counterpart on stage {value.target}: check the schedule first")
            sends[action] = value.send
            channels[rank, owner[value.target]].append(value)
    posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule]  # by the pass that they precede
    for (_, target), values in channels.items():
        # Each is due when it is needed, and no later than the messages sent after it.
        due = list(accumulate((needed_at[value] for value in reversed(values)), min))
        for value, at in zip(values, reversed(due), strict=True):
            posts[target][max(0, at - ahead)].append(value.receive)
    lines = []
    for rank, line in enumerate(schedule):
        added, index = list(posts[rank][0]), 0
        for action in line:
            added.append(action)
            if action.kind in PASSES:
                index += 1
                added += [*([sends[action]] if action in sends else []), *posts[rank][index]]
        lines.append(tuple(added))
    return tuple(lines)
