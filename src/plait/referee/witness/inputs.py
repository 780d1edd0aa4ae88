"""Checks which samples of a step each rank saw: each once, or a fault that has a name.

the step's batch     a b c d e f
rank 0, 2 calls      a b | c            rank 1, 1 call     d e f        right
rank 0               a b c              rank 1             a b c        d e f missing, the others twice
rank 0               a b c d e f        rank 1             a b c d e f  right: ranks share the work (tensor axis)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.referee.witness.judgement import Judgement, accuse, ranks_text
from plait.referee.witness.pieces import Row
from plait.referee.witness.replay import Replay
from plait.referee.witness.stored import RankStep
from plait.referee.wrong import LEFT_OUT

SHOWN = 6


@dataclass(frozen=True)
class ForwardCall:
    """One forward's samples, by their place in the step's batch."""

    rank: int
    call: int
    samples: tuple[int, ...]
    every: bool = False
    """True if it represents all forwards of the rank."""

    def __str__(self) -> str:
        if self.every:
            return f"rank {self.rank}"
        return f"forward {self.call} of rank {self.rank}"


def groups_of(steps: Sequence[RankStep], rows: Sequence[Row]) -> list[ForwardCall]:
    """The forwards whose samples together are the batch; empty if there are none.  The first of several ranks that
    share the work counts."""
    places: dict[Row, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row, []).append(place)
    found = []
    for rank, step in enumerate(steps):
        for number, call in enumerate(step.calls):
            wanted = Counter(call or ())
            if call and all(len(places.get(row, ())) >= times for row, times in wanted.items()):
                found.append(ForwardCall(rank, number, tuple(places[row].pop(0) for row in call)))
    return [] if any(places.values()) else found


def by_rank(groups: Sequence[ForwardCall]) -> list[ForwardCall]:
    """Joins the forwards of each rank into one."""
    samples: dict[int, tuple[int, ...]] = {}
    for group in groups:
        samples[group.rank] = (*samples.get(group.rank, ()), *group.samples)
    return [ForwardCall(rank, 0, own, every=True) for rank, own in samples.items()]


def repeats_alone(steps: Sequence[RankStep], rows: Sequence[Row]) -> bool:
    """True if the only fault of a step's samples is that a rank repeated a forward, as torch's pipelines do to learn
    shapes.  The gradient shows whether the repetition counts."""
    once: Counter[Row] = Counter()
    for step in steps:
        for call in dict.fromkeys(tuple(call) for call in step.calls if call):
            once.update(call)
    return once == Counter(rows)


def covers(ends: Sequence[RankStep], replay: Replay, step: int) -> bool:
    """True if the samples that the ranks saw after their last update are the whole batches of the next two steps; a
    single batch may be an evaluation."""
    try:
        wanted = Counter(replay.rows(step)) + Counter(replay.rows(step + 1))
    except Exception:  # a user's job may have no such batch
        return False
    seen = Counter(row for end in ends for call in end.calls for row in call or ())
    return bool(wanted) and wanted <= seen


def judge_inputs(
    number: int, steps: Sequence[RankStep], rows: Mapping[int, Sequence[Row]], called: bool
) -> Judgement | None:
    """The fault of a step's samples; None if every one was seen equally often.

    Args:
        steps: each rank's record of the step.
        rows: the true samples of each step of the run.
        called: True if forwards of the model were seen so far. A loop may call its parts, or ``forward`` itself.
    """
    ranks = len(steps)
    if called and (again := tuple(rank for rank, step in enumerate(steps) if not step.calls)) and number:
        cause = "the optimizer's step was called again with no forward in between: the update is applied twice"
        what = f"{ranks_text(again, ranks)} made it again"
        return accuse(number - 1, "update", what, cause, again, factor=2.0)
    seen = [Counter(row for call in step.calls for row in call or ()) for step in steps]
    if not any(seen) or not rows[number]:
        return None
    right, total = Counter(rows[number]), Counter[Row]()
    for one in seen:
        total.update(one)
    times = {total[row] // count for row, count in right.items()}
    if set(total) == set(right) and len(times) == 1 and total == Counter({r: c * min(times) for r, c in right.items()}):
        return None  # several ranks may share the work; the gradient shows whether they do
    if (judgement := _of_another_step(number, seen, rows, ranks)) is not None:
        return judgement
    places = {row: place for place, row in reversed(list(enumerate(rows[number])))}
    missing = sorted(places[row] for row in right if not total[row])
    twice = sorted(places[row] for row in right if total[row] > right[row])
    told = [f"{_samples(missing)} seen by no rank"] if missing else []
    told += [f"{_samples(twice)} seen more than once"] if twice else []
    guilty = tuple(rank for rank, one in enumerate(seen) if any(one[row] and total[row] > right[row] for row in one))
    if ranks > 1 and all(one == seen[0] for one in seen):
        cause = "every rank trains on the same samples: the sampler does not cut the data by rank"
    elif missing and not twice:
        cause = "samples are dropped: the data is cut too short, as by drop_last or a forgotten forward"
    elif missing:
        cause = "ranks share samples that belong to one of them: wrong rank or number of ranks in the sampler"
    else:
        cause = "samples are repeated: padding of the sampler, or a forward made twice"
    guilty = guilty or tuple(range(ranks))
    what = f"{' and '.join(told)} ({ranks_text(guilty, ranks)})"
    return accuse(number, "inputs", what, cause, guilty, factor=0.0 if missing else 2.0)


def _of_another_step(
    number: int, seen: Sequence[Counter[Row]], rows: Mapping[int, Sequence[Row]], ranks: int
) -> Judgement | None:
    right = Counter(rows[number])
    strange = {rank: Counter(row for row in one.elements() if row not in right) for rank, one in enumerate(seen)}
    guilty = tuple(rank for rank, one in strange.items() if one)
    if not guilty:
        return None
    first, who = strange[guilty[0]], ranks_text(guilty, ranks)
    found = next((step for step, own in rows.items() if step != number and set(first) <= set(own)), None)
    if found is None:
        cause = "they are of no step that was witnessed: other data, another order, or another preparation"
        return accuse(number, "inputs", f"{who} saw {first.total()} samples that are not of its batch", cause, guilty)
    what = f"{who} saw {first.total()} samples of step {found}"
    if found > number and seen[guilty[0]].total() > first.total():
        cause = f"its samples of step {number} and {found} went into one update: {LEFT_OUT}"
        return accuse(number, "update", what, cause, guilty, factor=0.0)
    away = abs(found - number)
    cause = f"its data is {away} step{'s' * (away > 1)} {'ahead' if found > number else 'behind'}"
    return accuse(number, "inputs", what, cause, guilty)


def _samples(places: Sequence[int]) -> str:
    shown = ", ".join(map(str, places[:SHOWN])) + (f" and {len(places) - SHOWN} more" if len(places) > SHOWN else "")
    return f"sample{'s' * (len(places) > 1)} {shown}"
