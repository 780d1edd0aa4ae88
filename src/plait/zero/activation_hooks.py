"""Hooks on activations that see where a unit's backward begins and ends; a leaf's are removed once they were called.

A unit's backward begins when the gradient of its output comes.  It ends when its parameters have theirs and, if it may
read them later, all its inputs too, over all its calls in the microbatch.  A backward that keeps its graph
(``torch.autograd.grad`` in a forward) does not count, since another will follow.

    forward A | forward B | backward A | backward B        a program's own loop: B's hooks outlive A's backward
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from plait.forward.context import graph_is_kept
from plait.torch_private import tree_leaves
from plait.zero.unit import Unit


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [value] if type(value) is Tensor else [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class ActivationHooks:
    """The hooks of every microbatch under way."""

    def __init__(self) -> None:
        self.microbatch = 0
        """The microbatch whose pass runs; all forwards of a program's own loop have one."""
        self._missing: defaultdict[int, Counter[Unit]] = defaultdict(Counter)
        """Inputs of each unit whose gradients have not come yet."""

    def when_gradient_comes(self, tensor: Tensor, call: Callable[[], None]) -> None:
        """Calls ``call`` when the tensor's gradient comes."""

        def come(gradient: Tensor) -> None:
            if leaf and not graph_is_kept():  # otherwise the hook goes with the graph
                handle.remove()
            call()

        leaf, handle = tensor.is_leaf, tensor.register_hook(come)

    def await_inputs(self, unit: Unit, inputs: Iterable[Any], call: Callable[[Unit], None]) -> None:
        """Calls ``call`` whenever the gradient of an input of the unit has come."""
        missing = self._missing[self.microbatch]

        def arrived() -> None:
            if not graph_is_kept():
                missing[unit] -= 1
                call(unit)

        for tensor in tensors_in(list(inputs)):
            if tensor.requires_grad:
                missing[unit] += 1
                self.when_gradient_comes(tensor, arrived)

    def inputs_have_come(self, unit: Unit) -> bool:
        """True, once, if the gradients of all the unit's inputs have come; False if none of them requires one."""
        missing = self._missing[self.microbatch]
        return missing.get(unit) == 0 and missing.pop(unit) == 0

    def drop(self) -> None:
        """Ends the step: gradients that have not come yet will not."""
        self._missing.clear()
