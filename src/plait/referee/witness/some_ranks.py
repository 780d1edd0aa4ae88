"""Explains wrong gradients and norms by parameters that only some ranks have, such as experts and stages."""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from plait.referee.contributions import NEAR, contributions
from plait.referee.difference import factor_text
from plait.referee.values import wide
from plait.referee.witness.stored import Witnessed

SURE = 4
"""The number of elements that each fitted gradient needs: fewer may fit by chance."""


def holders(witnessed: Witnessed, name: str) -> int:
    """The number of ranks that have a parameter, or a piece of it."""
    return sum(name in run.regions for run in witnessed.runs)


def norms_of_some(witnessed: Witnessed, true: Mapping[str, Tensor]) -> Iterator[tuple[float, str]]:
    """Wrong norms of a gradient ``true`` whose parameters are not on all ranks, each with its explanation."""
    ranks = len(witnessed.runs)
    alone = [name for name in true if holders(witnessed, name) < ranks]
    if not alone:
        return
    norms = [_norm(run.part(name, true[name]) for name in run.regions if name in true) for run in witnessed.runs]
    yield sum(norms) / ranks, "it is clipped by the mean of the ranks' norms, each of what that rank has"
    everywhere = _norm(g for name, g in true.items() if name not in alone)
    more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
    yield everywhere, f"the norm that it is clipped by leaves out what some ranks alone have ({alone[0]}{more})"


def _norm(gradients: Iterator[Tensor]) -> float:
    return math.sqrt(sum(wide(g).square().sum().item() for g in gradients))


def made_of_others(observed: Tensor, name: str, true: Mapping[str, Tensor]) -> str:
    """Names the parameters whose gradients make up a wrong one; empty if they do not explain it."""
    alike = [n for n, g in true.items() if g.shape == observed.shape and g.any()]
    if not alike or observed.numel() < SURE * len(alike):
        return ""
    found = contributions([observed], [[true[n]] for n in alike])
    if not found.determined or found.rest > NEAR:
        return ""
    parts = [(n, c) for n, c in zip(alike, found.coefficients, strict=True) if abs(c) > NEAR]
    if all(n == name for n, _ in parts):
        return ""
    told = [n if abs(c - 1) <= NEAR else f"{factor_text(c)} times {n}" for n, c in parts]
    return f"it is made of the gradients of {' and '.join(told)}"
