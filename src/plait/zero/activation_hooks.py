"""Hooks on activations that see where a unit's backward begins and ends; they are removed with their microbatch.

A unit's backward begins when the gradient of its output comes.  It ends when the gradients of all its inputs have come,
over all its calls in the microbatch.  A backward that keeps its graph (``torch.autograd.grad`` in a forward) does not
count, since another will follow.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from plait.forward.context import graph_is_kept
from plait.torch_private import tree_leaves
from plait.zero.unit import Unit


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [value] if type(value) is Tensor else [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


MANY = 1024
"""From this many hooks of one microbatch on, hooks of freed tensors are removed."""


class ActivationHooks:
    """The hooks of every microbatch under way."""

    def __init__(self) -> None:
        self.microbatch = 0
        """The microbatch whose pass runs; a program's own loop has only one."""
        self._handles: defaultdict[int, list[RemovableHandle]] = defaultdict(list)
        self._many = MANY
        self._missing: defaultdict[int, Counter[Unit]] = defaultdict(Counter)
        """Inputs of each unit whose gradients have not come yet."""

    def when_gradient_comes(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        """Calls ``call`` when the tensor's gradient comes (a hook on a parameter would outlive the microbatch)."""
        handles = self._handles[self.microbatch]
        handles.append(tensor.register_hook(call))
        if len(handles) >= self._many:  # in a frozen model no backward ends, and no microbatch is dropped
            handles[:] = [handle for handle in handles if handle.hooks_dict_ref() is not None]
            self._many = max(MANY, 2 * len(handles))

    def await_inputs(self, unit: Unit, inputs: Iterable[Any], call: Callable[[Unit], None]) -> None:
        """Calls ``call`` whenever the gradient of an input of the unit has come."""
        missing = self._missing[self.microbatch]

        def arrived(gradient: Tensor) -> None:
            if not graph_is_kept():
                missing[unit] -= 1
                call(unit)

        for tensor in tensors_in(list(inputs)):
            if tensor.requires_grad:
                missing[unit] += 1
                self.when_gradient_comes(tensor, arrived)

    def inputs_have_come(self, unit: Unit) -> bool:
        """True if the gradients of all the unit's inputs have come; False if none of them requires one."""
        return self._missing[self.microbatch].get(unit) == 0

    def drop(self, *microbatches: int) -> None:
        """Removes the hooks of microbatches that are over; without arguments, all hooks."""
        for microbatch in microbatches or {*self._missing, *self._handles}:
            self._missing.pop(microbatch, None)
            for handle in self._handles.pop(microbatch, ()):
                handle.remove()
