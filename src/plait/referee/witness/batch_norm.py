"""BatchNorm normalises over the samples of a call, and an engine may have cut them: the gradient shows how.

a single process               one call has the step's 12 samples
an engine with SyncBatchNorm   a call of 2 microbatches has 6, those of all ranks together
an engine without              each rank's call has its own 3

Each of them has another gradient.  A gradient that equals the second or the third is reported as such.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait.referee.contributions import over_samples
from plait.referee.witness.drift import BLIND, added, apart, other_orders, slack_of
from plait.referee.witness.gradient import Seen, Setting, compare
from plait.referee.witness.inputs import ForwardCall
from plait.referee.witness.judgement import Judgement, accuse
from plait.referee.witness.replay import Gradients, Replay, clipped
from plait.referee.witness.stored import RankStep


def judge_batch_norm(
    setting: Setting, seen: Sequence[Seen], steps: Sequence[RankStep], groups: Sequence[ForwardCall], replay: Replay
) -> Judgement | None:
    """Reports wrong gradients whose only fault is the samples over which BatchNorm normalised; None for others.

    Args:
        setting: has the step's true gradient, from one call.
        groups: the forwards whose samples are the step's batch.
    """
    names = over_samples(replay.model)
    if not names or not groups:
        return None
    calls: dict[int, list[int]] = {}
    for group in groups:
        calls.setdefault(group.call, []).extend(group.samples)
    alone, joined = [list(group.samples) for group in groups], list(calls.values())
    several = len({group.rank for group in groups}) > 1
    ways = ((joined, "one forward on all ranks" if several else "each forward"), (alone, "each forward"))
    found = next((way for way in ways if len(way[0]) > 1 and _explains(way[0], setting, steps, replay)), None)
    if found is None:
        return None
    parts, who = found
    ranks = tuple(one.rank for one in seen if one.wrong)
    worst = max(gap for one in seen for gap in one.wrong.values())
    sizes = sorted({len(samples) for samples in parts})
    many = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = f"BatchNorm ({names[0]}{others}) normalises over the samples of {who}, {many} of the step's"
    what += f" {setting.samples}, and nothing else is wrong"
    joint = "synchronise it (nn.SyncBatchNorm), " if several and parts is alone else ""
    cause = f"that is a different function from one over all of them: {joint}freeze it, or take GroupNorm"
    return accuse(setting.step, "gradient", "", f"{what}: {cause}", ranks, setting.ranks, residual=worst)


def _explains(parts: Sequence[Sequence[int]], setting: Setting, steps: Sequence[RankStep], replay: Replay) -> bool:
    def gradient(parts: Iterable[Sequence[int]]) -> tuple[Gradients, float, float]:
        total = added(replay, setting.step, parts, setting.count)
        return clipped(total, setting.clip, setting.true)

    right, norm, scaled = gradient(parts)
    others = zip(*map(other_orders, parts), strict=False)
    share = max((apart(gradient(other)[0], right) for other in others), default=0.0)
    slack = slack_of(min(share, BLIND), right)
    seen, _ = compare(replace(setting, true=right, norm=norm, scaled=scaled, slack=slack), steps)
    return not any(one.wrong for one in seen)
