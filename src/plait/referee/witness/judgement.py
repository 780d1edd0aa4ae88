"""The words of a judgement."""

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["equal", "initial", "options", "between", "inputs", "gradient", "update"]
"""The phases in the order of cause and effect; ``between``: after an update and before the next forward."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run: equal to the run of a single process, or the first thing that is not.

    ``factor`` is observed / true if one explains the fault, ``residual`` the largest |observed - true| over the largest
    |true| of the tensor (of all compared tensors, if all are equal), ``name`` the parameter, if it is about one.
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
    """The largest share of its largest element by which a gradient may be wrong unseen: 0 if none is judged coarsely, 1
    if one is not judged at all."""

    @property
    def word(self) -> str:
        """``equal``, ``equal where judged`` or ``different``."""
        return "different" if not self.equal else "equal where judged" if self.judged_to else "equal"

    @property
    def equal(self) -> bool:
        return self.phase == "equal"

    def __str__(self) -> str:
        return self.text


def accuse(
    step: int, phase: Phase, what: str, cause: str, ranks: tuple[int, ...] = (), of: int = 0, *,
    name: str = "", where: str = "", factor: float | None = None, residual: float = 1.0,
) -> Judgement:  # fmt: skip
    """The judgement of a fault: ``step 1, update of up.weight: rank 1: it was not made: CAUSE``.

    Args:
        of: the number of ranks; 0: ``what`` names the ranks.
        where: replaces phase and name in the text.
    """
    who = ranks_text(ranks, of) if of else ""
    parts = (f"step {step}, {where or phase + f' of {name}' * bool(name)}", who, what, cause)
    return Judgement(step, phase, name, ranks, factor, residual, cause, ": ".join(filter(None, parts)))


def ranks_text(ranks: tuple[int, ...], of: int) -> str:
    """``every rank``, ``rank 1``, ``ranks 0 and 2``."""
    if len(ranks) == of:
        return "every rank" if of > 1 else "the one rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:6]] + ([f"{len(ranks) - 6} more"] if len(ranks) > 6 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
