"""Finds writes that an engine would lose or spread wrongly.

writer                            target                         consequence
a forward                         a gathered parameter           the next reshard drops this rank's copy
a program between steps           a parameter with a master      the next update overwrites it
an optimizer                      ``p.data = ...`` of a piece    the unit's storage keeps the old values
an optimizer                      it keeps ``p.grad``            the next step's sums are made in that memory
a program between steps           a published piece              forwards, here or elsewhere, read copies of it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import torch

from plait.step.engine import Engine
from plait.torch_private import DisableTorchFunctionSubclass
from plait.zero.state.optimizer_state import is_plain
from plait.zero.unit import parameters_of


class WrittenParameters:
    """Compares the versions of parameters that are copies of other values around a step's passes, and between steps."""

    def __init__(self, engine: Engine) -> None:
        rows = parameters_of(engine.placed.units)
        self._watched = [(n, p, f.split) for n, p, f, _ in rows if f.split or f.master is not None]
        self._whole = [flat for unit in engine.placed.units for flat in unit.flats if not flat.split]
        self._before: list[int] = []
        self._allowed = -1

    def __call__(self, event: str, engine: Engine) -> None:
        if event in ("begun", "reducing"):
            self._check_replaced()
            self._check_copies(between=event == "begun")
        if event in ("begun", "reducing") and self._before and self._allowed == engine.placed.modified:
            self._check(between=event == "begun")
        if event in ("begun", "updated"):
            self._before, self._allowed = self._versions(), engine.placed.modified
        elif event in ("reducing", "discarded", "off"):
            self._before = []

    def _versions(self) -> list[int]:
        with DisableTorchFunctionSubclass():
            return [parameter._version for _, parameter, _ in self._watched]

    def _check_replaced(self) -> None:
        for name in (name for flat in self._whole for name in flat.replaced()):
            raise ValueError(
                f"p.data of parameter {name!r} was replaced: forwards read the new values, and the step updates the "
                f"old ones. Write in place (p.copy_(...)), and make changes of dtype, shape or device before the Engine"
            )

    def _check_copies(self, *, between: bool) -> None:
        """Compares values with the optimizer's copy: a write through ``p.data`` leaves no version."""
        for flat in self._whole:
            if flat.master is None:
                continue
            here, copy = flat.updated_at_rest, flat.master.to(flat.updated_at_rest)
            differs = (here != copy) & ~(here.isnan() & copy.isnan())
            for run in flat.layout.runs(*flat.optim_place):
                if differs[run.offset : run.offset + run.numel].any():
                    raise self._refusal(run.slot.name, between=between, split=False)

    def _check(self, *, between: bool) -> None:
        for (name, _, split), old, new in zip(self._watched, self._before, self._versions(), strict=True):
            if old != new:
                raise self._refusal(name, between=between, split=split)

    @staticmethod
    def _refusal(name: str, *, between: bool, split: bool) -> ValueError:
        when = "between two steps" if between else "in a forward, or between forward and backward"
        why = "goes when its unit is resharded" if split else "is rounded from the optimizer's own copy"
        return ValueError(
            f"parameter {name!r} was written to {when}: this rank's copy {why}. Write between steps, on "
            f"every rank the same, inside `with engine.gathered({name!r}, modify=True)`"
        )


class WrittenPieces:
    """Compares, in every step, the versions of pieces of which forwards read copies; a lookahead writes rarely."""

    def __init__(self, engine: Engine) -> None:
        flats = (flat for unit in engine.placed.units for flat in unit.flats)
        self._flats = [flat for flat in flats if flat.trainable and flat.published]
        self._before: list[int] = []
        """The number of times that parameters got new values, and the versions, after the last event."""

    def __call__(self, event: str, engine: Engine) -> None:
        if event not in ("begun", "updated"):
            return
        before, self._before = self._before, [engine.placed.modified, *(flat.updated._version for flat in self._flats)]
        if event == "updated" or self._before[:1] != before[:1]:
            return
        for flat in (f for f, old, new in zip(self._flats, before[1:], self._before[1:], strict=True) if old != new):
            raise ValueError(
                f"a piece in optimizer.param_groups was written to after its step, near {flat.layout.slots[0].name!r}: "
                f"forwards read copies of it, here or on other ranks, which keep the old values. Write to whole "
                f"parameters inside `with engine.gathered(modify=True)`, or in a hook that optimizer.step had before "
                f"its Engine was built"
            )


class OptimizerWrites:
    """Looks, after an optimizer's step, for values and gradients that the engine does not see."""

    def __init__(self, engine: Engine) -> None:
        self._homes = {id(piece.view): piece.view.data_ptr() for piece in engine.placed.owned}

    def __call__(self, event: str, engine: Engine) -> None:
        if event != "stepped":
            return
        for piece in engine.placed.owned:
            if piece.view.data_ptr() != self._homes[id(piece.view)]:
                raise ValueError(
                    f"the optimizer has replaced p.data of its piece of {piece.name!r}, so forwards would go on with "
                    f"the old values: it must update in place (p.copy_(...), p.add_(...))"
                )
        buffers = {o.gradient.untyped_storage().data_ptr() for o in engine.placed.owned if o.gradient.numel()}
        for optimizer in engine.optimizers:
            for state in (*optimizer.state.values(), vars(optimizer)):
                if key := _keeps(state, buffers):
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps a gradient beyond its step ({key!r}), and the next step's "
                        f"sums are made in that memory: keep p.grad.clone()"
                    )


def _keeps(kept: Any, buffers: Collection[int]) -> Any:
    """The key of a tensor in one of these storages, also in lists; None if there is none."""
    for key, value in list(kept.items() if isinstance(kept, dict) else enumerate(kept)):
        if isinstance(value, list | deque) and key != "param_groups":
            if _keeps(value, buffers) is not None:
                return key
        elif is_plain(value) and value.layout is torch.strided and value.numel():
            memory = value.untyped_storage().data_ptr()
            if memory in buffers:
                return key
    return None
