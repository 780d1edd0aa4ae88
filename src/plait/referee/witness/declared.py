"""Roundings that a loop declares: the judge's own process makes them too, and so measures their effect on a gradient.

    tf32    products of numbers with 10 binary digits          matrix products of a GPU
    bf16    7 digits, also when gradients are added up         autocast that the job lacks, bf16 all-reduce, DDP's hook
    fp16    10, and a small range                              the same in fp16

Rounding errs equally in both directions.  A common factor over all elements is no rounding, however small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from plait.referee.contributions import add
from plait.referee.difference import factor_text, fitted
from plait.referee.values import wide
from plait.referee.witness.gradient import Parts, Seen, Setting, calls_of, cause_of_factor, compare
from plait.referee.witness.judgement import Judgement, accuse
from plait.referee.witness.replay import Gradients, Replay, clipped
from plait.referee.witness.stored import RankStep
from plait.run.data.batches import split_samples
from plait.step.step import num_samples
from plait.torch_private import TorchDispatchMode

Rounding: TypeAlias = Literal["tf32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"tf32": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype with the same number of digits."""

_ATEN = torch.ops.aten
_PRODUCTS = {
    *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.mv, _ATEN.addmv),
    *(_ATEN.convolution, _ATEN.convolution_backward),
}
FEW = 16
"""In this many elements, a factor and rounding cannot be distinguished."""


def rounded(value: Any, rounding: Rounding) -> Any:
    """A tensor of fp32 or fp64 with the digits of a rounding; other values as they are."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    if rounding == "tf32":
        bits = value.float().contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(value.dtype)
    return value.to(DTYPES[rounding]).to(value.dtype)


class _Products(TorchDispatchMode):
    """Rounds the inputs and the result of a product."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = rounding

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        return rounded(func(*(rounded(arg, self.rounding) for arg in args), **(kwargs or {})), self.rounding)


def in_rounding(
    replay: Replay, step: int, true: Gradients, clip: float | None, rounding: Rounding, cuts: Sequence[int]
) -> Iterator[Gradients]:
    """Recomputes the clipped gradients ``true`` of a step with a rounding: for each of ``cuts``, as the sum of that
    many parts."""
    samples, count, in_16 = num_samples(replay.batch(step)), replay.count(step), rounding != "tf32"  # tf32 adds in fp32
    for parts in cuts:
        sums: Gradients = {}
        for first, number in split_samples(samples, min(parts, samples)):
            with _Products(rounding):
                made = replay.part(step, range(first, first + number), count).gradients
            own = {name: rounded(g, rounding) for name, g in made.items()} if in_16 else made
            sums = add(sums, own)
            sums = {name: rounded(g, rounding) for name, g in sums.items()} if in_16 else sums
        yield clipped(sums, clip, true)[0]


def judge_common_factor(
    setting: Setting, steps: Sequence[RankStep], seen: Sequence[Seen], honest: Sequence[Gradients], parts: Parts
) -> Judgement | None:
    """Reports a factor of all gradients whose rest may be rounding.  It is larger than this rest, and than three times
    the factor of an honest run; smaller factors are taken for rounding.

    Args:
        seen: each rank's gradients.
        honest: the step's gradients as honest runs round them.
    """
    spread, found = 0.0, []
    for one in seen:
        true, names = one.flat(one.true), one.true.keys()
        others = (one.flat({n: one.run.part(n, g[n]) for n in names}) for g in honest if names <= g.keys())
        spread = max([spread, *(abs(_factor(other, true)[0] - 1) for other in others)])
        factor, rest = _factor(one.flat(one.observed), true)
        if true.numel() < FEW or not abs(factor - 1) > rest:
            return None
        found.append(factor)
    if not found or abs((factor := found[0]) - 1) <= 3 * spread:
        return None
    scaled = {name: g * factor for name, g in setting.true.items()}
    slack = {name: gap * max(1.0, abs(factor)) for name, gap in setting.slack.items()}
    if any(one.wrong for one in compare(replace(setting, true=scaled, slack=slack), steps)[0]):
        return None
    ranks = tuple(one.rank for one in seen)
    cause = f"{cause_of_factor(factor, setting, calls_of(parts))}; a factor of all elements is no rounding"
    what = f"every gradient is {factor_text(round(factor, 3))} times what it should be"
    residual = abs(factor - 1)
    return accuse(setting.step, "gradient", what, cause, ranks, setting.ranks, factor=factor, residual=residual)


def _factor(observed: Tensor, true: Tensor) -> tuple[float, float]:
    """The c of observed = c * true + rest, and |rest| / |true|; (1, 0) if there is no such factor."""
    factor, rest = fitted(observed, true)
    size = wide(true).norm().item()
    return (factor, rest.norm().item() / size) if size and rest.isfinite().all() else (1.0, 0.0)
