"""What is said where code that works on cut activations takes a part for the whole: what it does, why, a way out."""

from collections.abc import Callable, Sequence

from plait.anymodel.tensor.marks import STEPS, Cut, Dims, cut_of


class CutRefusals:
    """ValueErrors; ``where``: the name of the running module, or None where nothing is to be refused."""

    def __init__(self, where: Callable[[], str | None]) -> None:
        self.where = where

    def refuse(self, name: str, cut: Cut, what: str, fix: str, reason: str = "") -> None:
        if (where := self.where()) is None:
            return
        if cut.unit.endswith(STEPS):
            left = "that sequence parallelism left on this rank"
            fix = f"say 'unsplit' for the module around it (it ran in {where!r}), or leave sequence parallelism out"
        else:
            left = f"that {cut.name!r}, a column-cut module, left on this rank"
        reason = reason or "each rank must treat them one by one"
        raise ValueError(
            f"{name!r} in module {where!r} {what} {sum(cut.parts)} of the {cut.whole} {cut.unit} {left}: {reason}; "
            f"{fix}; or say 'whole' for {where!r}, if it is right all the same"
        )

    def mixes(self, name: str, dims: Dims, along: Sequence[int]) -> None:
        for dim in along:
            if (cut := cut_of(dims[dim])) is not None:
                fix = "gather it first ('gathered' instead of 'column'), or leave the module whole"
                reason = "between a column and its row only element-wise functions are right"
                self.refuse(name, cut, "mixes", fix, "" if cut.unit.endswith(STEPS) else reason)

    def takes(self, name: str, cut: Cut, pieces: int) -> None:
        fused = f"if it holds {pieces} matrices end to end, say 'column in {pieces}'"
        sizes = f"{fused} (or their heads, as in 'column 8|2|2 by 16') for {cut.name!r}"
        self.refuse(name, cut, "takes some of", sizes, "which they are in the whole is not known")

    def counts(self, name: str, cut: Cut) -> None:
        fix = f"number them in the whole, or leave {cut.name!r} and what follows it whole"
        self.refuse(name, cut, "gives numbers to", fix, "torch.arange counts from 0 on every rank")
