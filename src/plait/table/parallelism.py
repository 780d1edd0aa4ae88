"""The layout of a model on the ranks, as one value: everything about who has what, and nothing that changes the sum.

    Engine(model, comm, parallelism=Parallelism(TABLE["zero3"], schedule="1f1b"), ...)
    Engine(model, comm, strategy="zero3", schedule="1f1b", ...)                          the same

Ranks with different settings would wait for each other forever, so the engine compares every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from plait.messages.wording import did_you_mean
from plait.table.cells import TABLE, Strategy, find_strategy
from plait.table.flat import BUCKET_BYTES, Cut
from plait.table.tensor_plan import Style, check_mapping

Recompute = Literal["full", "selective"]


def check_recompute(recompute: str | None, *, ring: bool) -> None:
    """Raises ValueError for attention recomputed in a ring, whose backward recomputes its scores anyway."""
    if ring and recompute == "selective":
        raise ValueError(
            "recompute selective with ring_attention, which keeps no scores and recomputes them by itself: give "
            "recompute full, or leave it out"
        )


@dataclass(frozen=True)
class Parallelism:
    """The layout of a model on a mesh.

    A strategy may be given by its name or text, ``units`` in any order, and lists where the fields are tuples.

    Raises:
        ValueError: no such strategy, ``cut`` or ``recompute``, or a negative ``prefetch`` or ``bucket``.
    """

    strategy: Strategy = TABLE["zero3"]
    """The row of the table."""
    units: tuple[str, ...] | None = None
    """The names of the modules to gather together; None wraps automatically by block."""
    cut: Cut = "element"
    """``"element"`` cuts parameters anywhere; ``"tensor"`` gives each to one owner."""
    prefetch: int = 1
    """The number of units that are gathered ahead of the running one."""
    bucket: int = BUCKET_BYTES
    """The most bytes of neighbouring units that share one buffer, and so one message, if parameters are whole at rest;
    0: every unit has its own."""
    tensor_plan: Mapping[str, str | Style] | None = None
    """The plan for a mesh with a tensor axis (see ``table.tensor_plan``); None takes the model's own plan."""
    sequence_parallel: bool = False
    """Cuts the activations between the tensor-parallel products in time."""
    ring_attention: bool = False
    """Over a context axis, keys and values travel in a ring and no rank has all of them; without masks and dropout."""
    all_to_all: bool = False
    """Over an expert axis each token goes only to the ranks of its experts; otherwise all tokens are gathered."""
    schedule: str | tuple[tuple[Any, ...], ...] | None = None
    """An order's name (see ``schedule.orders``), or the actions of every rank of the ``pipe`` axis, written by hand;
    None: 1f1b, or no pipeline if the axis has one rank."""
    chunks: int | None = None
    """The number of stages on each rank, for the order ``interleaved``."""
    hold: int | None = 1
    """The number of stages that a rank keeps unsharded for its next passes, under a row that splits parameters (a row
    that keeps them to the backward holds all in flight); None gathers units one by one in each pass."""
    split: tuple[int, ...] | None = None
    """The number of links of the model in each stage (see ``pipeline.stage_model``); None divides them equally."""
    recompute: Recompute | None = None
    """``"full"`` runs blocks again in backward, ``"selective"`` attention; None keeps every activation."""
    compile: bool = False
    """Compiles the forward of every unit that has no other unit inside."""

    def __post_init__(self) -> None:
        for name, kind in (("cut", Cut), ("recompute", Recompute)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known and (value is not None or name == "cut"):
                raise ValueError(f"{name}={value!r}: it is {' or '.join(map(repr, known))}")
        check_recompute(self.recompute, ring=self.ring_attention)
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch}: it is a number of units, from 0")
        if self.bucket < 0:
            raise ValueError(f"bucket={self.bucket}: it is a number of bytes, from 0")
        if self.tensor_plan is not None:
            check_mapping(self.tensor_plan)
        schedule = self.schedule
        normal = {
            "strategy": find_strategy(self.strategy),
            "units": None if self.units is None else tuple(sorted(self.units)),
            "split": None if self.split is None else tuple(self.split),
            "schedule": schedule if isinstance(schedule, str | None) else tuple(map(tuple, schedule)),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, **settings: Any) -> Parallelism:
        """Builds the layout from keywords; raises TypeError for an unknown one, with the nearest."""
        names = [field.name for field in fields(cls)]
        for name in settings.keys() - set(names):
            hint = did_you_mean(name, names, f"the settings are {', '.join(names)}")
            raise TypeError(f"unknown setting {name!r}: {hint}")
        return cls(**settings)

    def compared(self) -> dict[str, object]:
        """Returns the fields in the form that ranks compare: equivalent settings have equal text."""
        plan = self.tensor_plan
        texts = None if plan is None else sorted((pattern, str(style)) for pattern, style in plan.items())
        return vars(self) | {"tensor_plan": texts}
