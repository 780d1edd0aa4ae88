"""The first forward of a model under a tensor plan, in training and in evaluation: what is cut is followed through it.

What plait itself does on pieces is not: columns, rows and hooks say what they leave.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.forward.context import CurrentForward
from plait.forward.interceptor import Function
from plait.table.tensor_plan import Style
from plait.tensor import TensorAxis
from plait.tensor.follow import FollowCuts
from plait.tensor.marks import STEPS, Cut

FREE = {"whole", "shared", "experts", "local"}
"""Styles of modules whose own code works on pieces, or on what is whole."""

RESHAPES = {Tensor.reshape, torch.reshape}
DRAWS = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.scaled_dot_product_attention}
ALONGSIDE = RESHAPES | DRAWS
"""What is followed as one function: torch works out a -1 before it reshapes, and a rank makes its slice of a mask."""


class FirstForward(FollowCuts):
    """``on`` while a forward is followed."""

    def __init__(self, styles: Mapping[str, Style], axis: TensorAxis, current: CurrentForward) -> None:
        super().__init__(self._running)
        self.on = False
        self._styles, self._axis, self._current = styles, axis, current
        self._experts = tuple(f"{name}." for name, style in styles.items() if style.kind == "experts")
        self._seen: set[bool] = set()

    def begins(self, *, training: bool) -> None:
        """The model is called."""
        if training not in self._seen and not self.on:
            self._seen.add(training)
            self.on = True
            self.__enter__()

    def ends(self) -> None:
        """Its call has ended, or raised."""
        if self.on:
            self.on = False
            self.__exit__(None, None, None)

    def _running(self) -> str | None:
        name = self._current.context.module.name
        style = self._styles.get(name)
        free = style is not None and style.kind in FREE
        return None if free or name.startswith(self._experts) else name or "the model"

    def alongside(self, func: Function, call_next: Function, *args: Any, **kwargs: Any) -> Any:
        """Calls one of ``ALONGSIDE``."""
        x: Tensor = args[0] if args else kwargs["query" if func is F.scaled_dot_product_attention else "input"]
        if func in RESHAPES:
            shape = args[1:] or (kwargs["shape"],)
            self.check_view(x, shape[0] if isinstance(shape[0], tuple | list) else shape)
            return call_next(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)):
            return call_next(*args, **kwargs)
        with self.paused():
            y = call_next(*args, **kwargs)
        self.same(x, y)
        return y

    def in_time(self, x: Tensor, name: str) -> Tensor:
        """A stream that was left here, which sequence parallelism cuts."""
        if self.on and self._axis.sequence:
            self.mark(x, 1, Cut(name, self._axis.length, (x.size(1),), unit=STEPS))
        return x
