"""The answer of a judgement: the first wrong tensor, its place, its fault, and the likely cause."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plait.referee.difference import Discrepancy, factor_text

Phase = Literal[
    "initial values", "input", "parameter", "forward", "loss", "backward", "contribution", "sum", "norm", "clip",
    "update", "publish", "state",
]  # fmt: skip
"""The phases in causal order within a step; ``SAID`` explains each."""

SAID: dict[Phase, str] = {
    "initial values": "the value of {name} that the first forward reads",
    "input": "the input of {name}",
    "parameter": "the value of {name} that the forward reads",
    "forward": "the output of {name}",
    "loss": "the loss",
    "backward": "the gradient that comes back to the output of {name}",
    "contribution": "what one microbatch adds to the gradient of {name}",
    "sum": "the sum over microbatches and ranks of the gradient of {name}",
    "norm": "the norm of the gradients",
    "clip": "the clipped gradient of {name}",
    "update": "{name} after its update",
    "publish": "{name}, as the ranks get it after the update",
    "state": "the optimizer's state of {name}",
}


@dataclass(frozen=True)
class FirstWrong:
    """The earliest tensor, in causal order, that differs from a single process's.

    ``step`` counts from 0.  ``ranks`` and ``microbatches`` name where it is wrong; ``of_ranks`` is the world size.
    ``after`` names the last right tensor before it, ``others`` counts the other wrong ones of the same phase.
    """

    step: int
    phase: Phase
    name: str
    ranks: tuple[int, ...]
    of_ranks: int
    discrepancy: Discrepancy
    microbatches: tuple[int, ...] = ()
    after: str = ""
    others: int = 0
    cause: str = ""

    @property
    def what(self) -> str:
        """Names the tensor in words."""
        return said(self.phase, self.name)

    def __str__(self) -> str:
        lines = [f"first wrong: step {self.step + 1}, {self.what}{self._where()}: {self.discrepancy}"]
        if self.after:
            lines.append(f"  still right: {self.after}")
        if self.others:
            lines.append(f"  wrong too, of the same kind: {self.others} more")
        if self.cause:
            lines.append(f"  likely: {self.cause}")
        return "\n".join(lines)

    def _where(self) -> str:
        if not self.ranks or len(self.ranks) == self.of_ranks > 1:
            where = f", on all {self.of_ranks} ranks" if self.of_ranks > 1 else ""
        else:
            where = f", on rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
            where += f" of {self.of_ranks}" if self.of_ranks > 1 else ""
        if self.microbatches:
            several = "es" if len(self.microbatches) > 1 else ""
            where += f", microbatch{several} {', '.join(map(str, self.microbatches))}"
        return where

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"what": self.what, "text": str(self)}


def said(phase: Phase, name: str) -> str:
    """Names a tensor of a phase in words."""
    return SAID[phase].format(name=repr(name) if name else "the model")


def cause_of_norm(ours: float, right: float, of_ranks: Sequence[float]) -> str:
    """Says in words why a norm is wrong.

    Args:
        of_ranks: for each rank, the sum of the squares of the elements that it owns, as a single process has them.
    """
    for rank, squares in enumerate(of_ranks):
        if squares and len(of_ranks) > 1 and abs(ours / squares**0.5 - 1) < 1e-5:
            return f"it is the norm of rank {rank}'s own elements: the squares are not summed over the ranks"
    times = (ours / right) ** 2 if right else 0.0
    if abs(times - round(times)) < 1e-3 and round(times) > 1:
        return f"its squares are counted {round(times)} times: what several ranks hold is counted on each"
    if times and abs(1 / times - round(1 / times)) < 1e-3 and round(1 / times) > 1:
        return f"it has 1/{round(1 / times)} of the squares"
    if times > 1:
        return f"it has {factor_text(times)} times the squares: what several ranks hold may be counted more than once"
    return "some squares are missing"


def cause_of_parameter(pattern: str, *, stale: bool, at_rest: bool) -> str:
    """Says in words why a parameter is read with another value."""
    if at_rest:
        return "it is read while its values are elsewhere: not gathered yet, or given away already"
    if stale:
        return "it is the value from before the last update: the new one was not gathered, or not published"
    if pattern in ("permutation", "region", "noise"):
        return (
            "pieces of it were gathered into the wrong places, one rank's piece is wrong, or it began with other values"
        )
    return ""


LEFT_OUT = "the optimizer's step was left out"


def cause_of_update(factor: float | None, *, every: bool = True) -> str:
    """Says in words why an update is wrong.

    Args:
        factor: how far the parameter moved, over how far it should have; None if no factor explains it.
        every: True if the others are wrong in the same way.
    """
    if factor is None:
        return "the optimizer made something else of the right gradient: its state, its group, or its constants"
    if abs(factor) < 1e-2:
        return LEFT_OUT if every else "the optimizer leaves it out"
    if abs(factor - 2) < 2e-2:
        return "the update was applied twice, or with twice the learning rate that the optimizer says"
    return "a learning rate other than the one that the optimizer says, or a scaled gradient"
