"""Records what happens in a model while it trains: every value that a module reads or passes on, in that order.

    parameter     as a module reads it, before its forward
    forward       the output of a module
    backward      the gradient of a module's output
    contribution  the part of a parameter's gradient that one microbatch adds

A tape listens through hooks and changes nothing.  Two tapes of the same microbatch, one of a layout and one of a
single process, have the same marks, so the first that differs is the first wrong tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.referee.wrong import Phase
from plait.torch_private import DisableTorchFunction, current_graph_task_id, tree_leaves


class Mark(NamedTuple):
    """A place on a tape: the microbatch, the phase, the module or parameter, and the number of its call."""

    microbatch: int
    phase: Phase
    name: str
    call: int = 0


class Tape:
    """Records a model; ``marks`` are in the order in which they happened.

    Args:
        microbatch: returns the current microbatch; None while nothing is to be recorded.
    """

    def __init__(self, microbatch: Callable[[], int | None]) -> None:
        self.microbatch = microbatch
        self.marks: dict[Mark, Tensor] = {}
        self._calls: dict[tuple[int, str], int] = {}

    def clear(self) -> None:
        """Forgets all recorded marks: a step begins."""
        self.marks, self._calls = {}, {}

    def follow(self, model: nn.Module, foreign: tuple[type[nn.Module], ...] = ()) -> None:
        """Listens to a model from now on.

        Args:
            foreign: the kinds of modules that only replace a module of another rank; the modules around them have
                other outputs than in a single process.
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
        microbatch = self._now()
        if microbatch is None:
            return
        with DisableTorchFunction(), torch.no_grad():
            for short, parameter in module._parameters.items():
                if parameter is not None:
                    mark = Mark(microbatch, "parameter", _join(name, short))
                    self.marks.setdefault(mark, _copy(parameter.data))

    def _made(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        microbatch = self._now()
        if microbatch is None:
            return
        call = self._calls[microbatch, name] = self._calls.get((microbatch, name), -1) + 1
        leaves = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        for index, leaf in enumerate(leaves):
            part = name if len(leaves) == 1 else f"{name}[{index}]"
            self.marks[Mark(microbatch, "forward", part, call)] = _copy(leaf)
            if leaf.requires_grad:
                leaf.register_hook(partial(self._came_back, Mark(microbatch, "backward", part, call)))

    def _came_back(self, mark: Mark, gradient: Tensor) -> None:
        self.marks[mark] = _copy(gradient)

    def _contributes(self, name: str, gradient: Tensor) -> None:
        microbatch = self.microbatch()
        if microbatch is not None and gradient is not None:
            self.marks[Mark(microbatch, "contribution", name)] = _copy(gradient)

    def _now(self) -> int | None:
        """The microbatch whose forward runs; None in a recomputation, which only repeats it."""
        again = current_graph_task_id() != -1
        return None if again or not torch.is_grad_enabled() else self.microbatch()


def _join(module: str, short: str) -> str:
    return f"{module}.{short}" if module else short


def _copy(tensor: Tensor) -> Tensor:
    with DisableTorchFunction(), torch.no_grad():
        return tensor.detach().to("cpu", copy=True)
