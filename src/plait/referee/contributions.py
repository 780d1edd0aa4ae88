"""Finds which samples a gradient holds, and how often.

Most silent bugs of data parallelism are one linear fault: a sum that leaves a part out, counts one twice, or
divides by the wrong number.  The true gradient is a sum of parts, one for each sample or microbatch,

    true = g0 + g1 + g2 + g3              observed = c0 g0 + c1 g1 + c2 g2 + c3 g3 + rest

so the coefficients that fit best show the fault: all 1 is right, all 1/4 is one division too many, (1, 1, 0, 0) lacks
the other rank's samples, and (0, 0, 0, 1) forgets all microbatches but the last.  If no coefficients explain the
``rest``, the fault is not in a sum: a module computed something else, or the pieces are in other places.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.referee.difference import factor_text
from plait.referee.values import rounding, wide

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONDITION = 1e9
"""The largest condition of the parts' normalised Gram matrix; beyond it the parts are too similar to distinguish."""

NEAR = 2e-3
"""Coefficients this near to a value count as that value if the rest is small."""


@dataclass(frozen=True)
class Contributions:
    """The number of times that an observed gradient holds each part.

    ``rest`` is |observed - sum of c_i g_i| / |observed|.  ``determined`` is False if the parts are too similar, or if
    there are more parts than elements: then the coefficients are the smallest that fit.
    """

    coefficients: tuple[float, ...]
    rest: float
    determined: bool


def contributions(observed: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> Contributions:
    """Fits an observed gradient by its parts: least squares over all the tensors together, in fp64.

    Args:
        observed: the gradient of each parameter (or piece of one).
        parts: for each sample or microbatch, the true gradient of each of these parameters.
    """
    count = len(parts)
    gram = torch.zeros(count, count, dtype=torch.float64)
    right = torch.zeros(count, dtype=torch.float64)
    total, numel = 0.0, 0
    for index, tensor in enumerate(observed):
        a = torch.stack([wide(part[index].to(_double([tensor]))).reshape(-1) for part in parts])
        b = wide(tensor).reshape(-1)
        gram += a @ a.T
        right += a @ b
        total += b.dot(b).item()
        numel += b.numel()
    if not math.isfinite(total) or not (gram.isfinite().all() and right.isfinite().all()):
        return Contributions((math.nan,) * count, math.inf, False)
    norms = gram.diagonal().sqrt()
    present = norms > 0
    scale = torch.where(present, norms, 1.0)
    normal = gram / scale[:, None] / scale[None, :]
    values = torch.linalg.eigvalsh(normal) if count else normal.new_zeros(0)
    alike = bool(present.all()) and count > 0 and values[0].item() * CONDITION > values[-1].item()
    solution = torch.linalg.lstsq(normal, (right / scale)[:, None], rcond=1 / CONDITION, driver="gelsd").solution
    c = solution[:, 0] / scale
    left = total - 2 * c.dot(right).item() + c.dot(gram @ c).item()
    rest = math.sqrt(max(left, 0.0) / total) if total else 0.0
    return Contributions(tuple(c.tolist()), rest, alike and numel >= count)


def explain(c: Sequence[float], counts: Sequence[float] | None = None, names: Sequence[str] | None = None) -> str:
    """Describes the fault of a sum in words; empty if every part counts once.

    Args:
        c: how often the sum holds each part.
        counts: the number of terms in each part, to recognise a mean of means.
        names: the parts' names ("microbatch 0 of rank 1"); otherwise "part 0", "part 1", ...
    """
    called = list(names) if names is not None else [f"part {i}" for i in range(len(c))]
    if not c or all(_near(x, 1.0) for x in c):
        return ""
    if all(abs(x) <= NEAR for x in c):
        return "nothing is in it"
    first = c[0]
    if all(_near(x, first) for x in c):
        return f"every part counts {factor_text(first)} times"
    present = [x for x in c if abs(x) > NEAR]
    if present and len(present) < len(c):
        missing = _listed([n for n, x in zip(called, c, strict=True) if abs(x) <= NEAR])
        kept = [n for n, x in zip(called, c, strict=True) if abs(x) > NEAR]
        times = dict.fromkeys(factor_text(x) for x in present)
        factor = "" if all(_near(x, 1.0) for x in present) else f", counted {' or '.join(times)} times"
        if len(kept) == 1 < len(c) - 1:
            return f"only {kept[0]} is in it{factor}"
        others = factor and f"; what is in it is{factor[1:]}"
        return f"{missing} {'is' if len(c) - len(present) == 1 else 'are'} missing{others}"
    if counts is not None and len(set(counts)) > 1:
        weighed = [x * n for x, n in zip(c, counts, strict=True)]
        if all(_near(w, weighed[0]) for w in weighed):
            return "a mean of means: each part counts the same, however many terms it has"
    odd = [(n, x) for n, x in zip(called, c, strict=True) if not _near(x, 1.0)]
    told = _listed([f"{n} counts {factor_text(x)} times" for n, x in odd])
    return f"{told} instead of once" if len(odd) < len(c) else told


@dataclass(frozen=True)
class Grouping:
    """Groups of parts, each with a name."""

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]


def groupings(ranks: int, microbatches: int) -> list[Grouping]:
    """The groupings of a step's microbatches, coarse to fine; part r * microbatches + m is microbatch m of data rank
    r."""
    every = range(ranks * microbatches)
    at = [divmod(i, microbatches) for i in every]
    found = [Grouping(("every part",), (tuple(every),))]
    if ranks > 1:
        of_rank = tuple(tuple(i for i in every if at[i][0] == r) for r in range(ranks))
        found.append(Grouping(tuple(f"data rank {r}" for r in range(ranks)), of_rank))
    if microbatches > 1:
        of_turn = tuple(tuple(i for i in every if at[i][1] == m) for m in range(microbatches))
        each = " of each rank" if ranks > 1 else ""
        found.append(Grouping(tuple(f"microbatch {m}{each}" for m in range(microbatches)), of_turn))
    if ranks > 1 and microbatches > 1:
        names = tuple(f"microbatch {m} of data rank {r}" for r, m in at)
        found.append(Grouping(names, tuple((i,) for i in every)))
    return found


def cause_of_sum(
    observed: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    counts: Sequence[float],
    within: Sequence[Grouping],
    before: Sequence[Tensor] | None = None,
) -> str:
    """Says in words why a sum is wrong, by the coarsest grouping that explains it; empty if none does.

    Args:
        observed: as in ``contributions``, like ``parts``.
        counts: the number of terms in each part.
        within: the groupings to try, coarse to fine.
        before: the sum of the previous step, which should not be in it.
    """
    limit = 10 * max(rounding(tensor.dtype, 1e-5) for tensor in observed)
    for grouping in within:
        grouped = [[sum_of([parts[i][k] for i in of]) for k in range(len(observed))] for of in grouping.members]
        found = contributions(observed, [*grouped, before] if before is not None else grouped)
        if found.rest > limit or not found.determined:
            continue
        if before is not None and abs(found.coefficients[-1]) > NEAR:
            return "it goes on from the sum of the step before"
        terms = [sum(counts[i] for i in of) for of in grouping.members]
        told = explain(found.coefficients[: len(grouped)], terms, grouping.names)
        return told or "the right terms, added in another order"
    return ""


def over_samples(model: nn.Module) -> list[str]:
    """The names of the modules that normalise over a call's samples; frozen ones use their running statistics.

    If a model has one, the parts of a batch do not add up to the whole.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None)
    ]


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum of two gradients, element by element; a parameter with a gradient on one side only keeps that one."""
    return {**left, **right} | {name: left[name] + right[name] for name in left if name in right}


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in fp64, or in complex128."""
    return torch.stack([tensor.detach().to(_double(tensors)) for tensor in tensors]).sum(0)


def _double(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64


def _near(value: float, target: float) -> bool:
    return abs(value - target) <= NEAR * max(1.0, abs(target))


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:6]) + ([f"{len(names) - 6} more"] if len(names) > 6 else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
