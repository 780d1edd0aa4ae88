"""Records what happens in a model while it trains: every value that a module reads or passes on, in that order.

    parameter     as a module reads it, before its forward
    forward       the output of a module
    backward      the gradient of a module's output
    contribution  the part of a parameter's gradient that one microbatch adds

A tape listens through hooks and changes nothing.  Two tapes of the same microbatch, one of a layout and one of a
single process, have marks at the same places, so the first that differs is the first wrong tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.referee.wrong import Phase
from plait.torch_private import DisableTorchFunction, current_graph_task_id, tree_leaves


class Where(NamedTuple):
    """A place in a run: a module or parameter, and the number of its call.  A loss without a microbatch is the step's;
    ``key`` names a part of an optimizer's state."""

    step: int
    phase: Phase
    name: str = ""
    microbatch: int | None = None
    call: int = 0
    key: str = ""


class Tape:
    """Records a model; ``marks`` are in the order in which they happened.

    Args:
        place: returns the current step and microbatch; None while nothing is to be recorded.
    """

    def __init__(self, place: Callable[[], tuple[int, int] | None]) -> None:
        self.place = place
        self.marks: dict[Where, Tensor] = {}
        self._calls: dict[tuple[int, str], int] = {}

    def clear(self) -> None:
        """Forgets all recorded marks: a step begins."""
        self.marks, self._calls = {}, {}

    def follow(self, model: nn.Module, foreign: tuple[type[nn.Module], ...] = ()) -> None:
        """Listens to a model from now on.

        Args:
            foreign: the kinds of modules that only replace a module of another rank; the modules around them do
                not have the outputs of a single process.
        """
        for name, module in model.named_modules():
            if isinstance(module, foreign):
                continue
            module.register_forward_pre_hook(partial(self._reads, name))
            for short, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    parameter.register_hook(partial(self._contributes, _join(name, short)))
            if not any(isinstance(inside, foreign) for inside in module.modules()):
                module.register_forward_hook(partial(self._made, name), prepend=True)  # before it is passed on

    def _reads(self, name: str, module: nn.Module, args: Any) -> None:
        if (now := self._now()) is None:
            return
        step, microbatch = now
        with DisableTorchFunction(), torch.no_grad():
            for short, parameter in module._parameters.items():
                if parameter is not None:
                    where = Where(step, "parameter", _join(name, short), microbatch)
                    self.marks.setdefault(where, _copy(parameter.data))

    def _made(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if (now := self._now()) is None:
            return
        step, microbatch = now
        call = self._calls[microbatch, name] = self._calls.get((microbatch, name), -1) + 1
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        leaves = [leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]
        for index, leaf in enumerate(leaves):
            part = name if len(leaves) == 1 else f"{name}[{index}]"
            self.marks[Where(step, "forward", part, microbatch, call)] = _copy(leaf)
            if leaf.requires_grad:
                leaf.register_hook(partial(self._came_back, Where(step, "backward", part, microbatch, call)))

    def _came_back(self, where: Where, gradient: Tensor) -> None:
        self.marks[where] = _copy(gradient)

    def _contributes(self, name: str, gradient: Tensor) -> None:
        if (now := self.place()) is not None and gradient is not None:
            step, microbatch = now
            self.marks[Where(step, "contribution", name, microbatch)] = _copy(gradient)

    def _now(self) -> tuple[int, int] | None:
        """The step and microbatch whose forward runs; None in a recomputation, which only repeats it."""
        again = current_graph_task_id() != -1
        return None if again or not torch.is_grad_enabled() else self.place()


def _join(module: str, short: str) -> str:
    return f"{module}.{short}" if module else short


def _copy(tensor: Tensor) -> Tensor:
    with DisableTorchFunction(), torch.no_grad():
        return tensor.detach().to("cpu", copy=True)
