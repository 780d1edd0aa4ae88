"""The words of a judgement."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from plait.referee.values import largest, wide

Phase = Literal["equal", "initial", "options", "between", "inputs", "gradient", "update", "loss"]
"""In the order of cause and effect; ``between`` an update and the next forward nothing may change."""


@dataclass(frozen=True)
class Judgement:
    """What a run is: equal to the run of a single process, or the first thing that is not.

    ``factor`` is observed / true where one explains it, ``residual`` the largest |observed - true| beside the largest
    |true| of the tensor (of all that was compared, where all is equal), ``name`` the parameter, if it is about one.
    """

    step: int | None
    phase: Phase
    name: str
    ranks: tuple[int, ...]
    factor: float | None
    residual: float
    cause: str
    text: str
    judged_to: float = field(default=0.0, repr=False)
    """The share of its largest element below which a gradient may be wrong unseen, of the gradient where it is largest:
    0 where none is judged coarsely, 1 where one is not judged at all."""

    @property
    def word(self) -> str:
        """``equal``, ``equal where judged`` or ``different``."""
        return "different" if not self.equal else "equal where judged" if self.judged_to else "equal"

    @property
    def equal(self) -> bool:
        return self.phase == "equal"

    def __str__(self) -> str:
        return self.text


def fit(one: Tensor, other: Tensor, slack: float) -> float | None:
    """The c of one = c * other; None where an element is off by more than ``slack``."""
    a, b = wide(one).reshape(-1), wide(other).reshape(-1)
    square = b.dot(b).item()
    if not square or not a.isfinite().all():
        return None
    factor = a.dot(b).item() / square
    return factor if largest(a - factor * b) <= slack * max(1.0, abs(factor)) else None


def ranks_text(ranks: tuple[int, ...], of: int) -> str:
    """``every rank``, ``rank 1``, ``ranks 0 and 2``."""
    if len(ranks) == of:
        return "every rank" if of > 1 else "the one rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:6]] + ([f"{len(ranks) - 6} more"] if len(ranks) > 6 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
