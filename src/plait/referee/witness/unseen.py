"""Says with the verdict what a judgement could not look at, because silence would read as a proof."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from plait.referee.values import largest, last_bits, tolerance, wide
from plait.referee.witness.drift import Slack
from plait.referee.witness.judgement import Judgement, accuse
from plait.referee.witness.replay import Gradients
from plait.referee.witness.stored import RankStep, Witnessed

COARSE, HIDDEN = 0.011, 0.25
"""Shares of a gradient's largest element: if more may be rounding, it is judged only coarsely, or not at all."""


class Unseen:
    """Collects, step by step, what could not be judged."""

    def __init__(self, witnessed: Witnessed) -> None:
        self.witnessed = witnessed
        self.excused = 0.0
        """The share of a gradient's largest element that was taken for rounding."""
        self.why = "parts of a batch do not add up to it more closely"
        self.behind = 0
        """The number of forwards after the last update."""
        self._small: dict[str, None] = {}
        self._coarse: dict[str, float] = {}
        """The gradients that are judged only to a share of their largest element."""
        self._spread: dict[str, None] = {}
        self._hidden: dict[str, None] = {}
        self._idle: dict[int, list[int]] = {}
        """The steps that each optimizer did not make."""
        self._steps = 0

    def see_gradients(self, true: Gradients, slack: Slack) -> None:
        """Notes the true gradients that are so far below the largest that rounding would hide them, or more than 1 % of
        them, and those with most elements so far below their own largest that they might as well be zero."""
        sizes = {name: largest(g) for name, g in true.items()}
        overall = max(sizes.values(), default=0.0)
        for name, size in sizes.items():
            allowed = max(tolerance(true[name].dtype, size, overall), slack.get(name, 0.0))
            if size and allowed > HIDDEN * size:
                self._small[name] = None
            elif size and allowed > COARSE * size:
                self._coarse[name] = max(allowed / size, self._coarse.get(name, 0.0))
            elif 2 * ((there := wide(true[name]).abs() > 0) & (wide(true[name]).abs() <= allowed)).sum() > there.sum():
                self._spread[name] = None

    def see_updates(self, due: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
        """Notes the right updates that are only in last bits: a missing update would pass as well."""
        for name, value in due.items():
            bits = last_bits(value.dtype, 1.0) * torch.maximum(wide(value).abs(), wide(start[name]).abs())
            moved = (wide(value) - wide(start[name])).abs()
            if moved.any() and bool((moved <= bits).all()):
                self._hidden[name] = None

    def see_step(self, number: int, steps: Sequence[RankStep]) -> None:
        """Notes a step that was right."""
        self._steps += 1
        for optimizer in self._optimizers():
            if all(optimizer not in step.about["stepped"] for step in steps):
                self._idle.setdefault(optimizer, []).append(number)

    def _optimizers(self) -> list[int]:
        return sorted({piece.group[0] for run in self.witnessed.runs for piece in run.pieces if piece.group})

    def _of(self, optimizer: int) -> list[str]:
        pieces = (piece for run in self.witnessed.runs for piece in run.pieces)
        return list(dict.fromkeys(p.name for p in pieces if p.group and p.group[0] == optimizer and p.trained))

    def judge_forgotten(self) -> Judgement | None:
        """Reports an optimizer that never made a step."""
        for optimizer, steps in self._idle.items():
            took_turns = self._steps < len(self._optimizers())  # its turn may not have come yet
            if len(steps) == self._steps and not took_turns and (names := self._of(optimizer)):
                ranks = tuple(run.rank for run in self.witnessed.runs)
                cause = f"its optimizer, number {optimizer}, made none of {_counted(self._steps, 'step')}"
                others = f", nor were those of {_counted(len(names) - 1, 'other')}" * (len(names) > 1)
                return accuse(0, "update", f"it was not made{others}", cause, ranks, name=names[0], factor=0.0)
        return None

    @property
    def judged_to(self) -> float:
        """The value for ``Judgement.judged_to``."""
        return 1.0 if self._small else max(self._coarse.values(), default=0.0)

    def text(self) -> str:
        """Says in words what was not judged; empty if all was."""
        told = ""
        if self.excused:
            told += (
                f"; differences of up to {self.excused:.2%} of a gradient's largest element are taken for rounding, "
                f"since {self.why}"
            )
        coarse = {name: share for name, share in self._coarse.items() if name not in self._small}
        if (worst := max(coarse.values(), default=0.0)) > 1.001 * self.excused:  # else that is said already
            told += f"; judged to {worst:.1%} only: {_counted(len(coarse), 'gradient')} ({_few(coarse)})"
        if self._small:
            told += f"; not judged: {_counted(len(self._small), 'gradient')} far below the largest one "
            told += f"({_few(self._small)})"
        if self._spread:
            told += f"; hardly judged: {_counted(len(self._spread), 'gradient')} most of whose elements are far below "
            told += f"the largest ({_few(self._spread)})"
        if self._hidden:
            told += f"; not judged: {_counted(len(self._hidden), 'update')} in the last bits of the parameter "
            told += f"({_few(self._hidden)})"
        for optimizer, steps in self._idle.items():
            told += (
                f"; not judged: {_counted(len(self._of(optimizer)), 'parameter')} in {_counted(len(steps), 'step')} "
            )
            told += f"that optimizer number {optimizer} did not make ({_few(map(str, steps))})"
        if self.behind:
            told += f"; not judged: {_counted(self.behind, 'forward')} after the last update"
        return told


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _few(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
