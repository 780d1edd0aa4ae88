"""Two handlers: one keeps a parameter at rest from being read, one gathers a unit again for what backward reads.

``AtRestCheck`` sees every function that reads a parameter of a split unit.  Outside of the model's call it also sees
those that read a parameter of a stage:

- A unit that reads a parameter *at rest* borrows it: it is gathered now, and from then on whenever that unit is.
- A read outside of a unit's forward raises, with the names of the parameter and the function.
- A unit that reads another's parameter *while the schedule holds it gathered* borrows it too, because its backward may
  be the first to read it.
- The node that the function leaves in the autograd graph unshards the running unit before it runs.  A unit's outputs
  do so as well (see ``unshard``).  This catches tensors that leave a module in other ways, such as an auxiliary loss.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.context import CurrentForward, ModuleCall, in_backward
from plait.forward.interceptor import Function, Handler, read_among
from plait.forward.parameter import AtRest
from plait.tensor.metadata import name_of
from plait.torch_private import DisableTorchFunction, tree_leaves


def _is_itself(parameter: Tensor, value: Tensor) -> bool:
    """True if ``p.data = value`` changes nothing."""
    with DisableTorchFunction():
        layouts = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (parameter, value)]
    return layouts[0] == layouts[1]


class AtRestCheck(Handler):
    """Watches for reads of parameters, by ``id``: those of ``split`` units, and in ``loss_fn`` those that are
    ``staged``, because ``loss_fn`` runs on one stage of several."""

    def __init__(self, current: CurrentForward, split: Mapping[int, nn.Parameter], staged: set[int]) -> None:
        self.current, self.split, self.staged = current, split, staged
        self.parameters = split.keys() | staged
        self.rests = not split  # otherwise it gathers the parameters that are read

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        context, arguments = self.current.context, (*args, *kwargs.values())
        outside = self.staged and not context.module.in_model and not in_backward()
        if outside and read_among(arguments, self.staged):
            raise ValueError(
                f"loss_fn reads a parameter by {name_of(func)!r} outside of the model's call: under a pipeline each "
                f"stage has only its own; let the model compute the term, or the optimizer (weight decay)"
            )
        read = read_among(arguments, self.split)
        for parameter in map(self.split.__getitem__, read):
            if context.units and not in_backward():
                context.units[-1].reads(parameter)
            elif isinstance(parameter, AtRest):
                raise parameter.refusal(func, [parameter])
        if read and name_of(func) == "data":
            if func.__name__ == "__set__":
                if _is_itself(*args):  # as module.to() does if the dtype stays the same
                    return None
                raise ValueError(
                    "p.data is replaced in a forward: the unit is resharded after it, and the values would be lost. "
                    "Write between steps inside `with engine.gathered(..., modify=True)`"
                )
            func = call_next = Tensor.detach  # the same values, and the same version counter: writes are seen
        result = call_next(*args, **kwargs)
        if read and context.units and torch.is_grad_enabled():
            unshard = context.units[-1].open_again
            for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda *gradients: unshard())
                    base = tensor._base if type(tensor) is Tensor else None
                    if base is not None and base.grad_fn is not None:  # an in-place write leaves a node there
                        base.grad_fn.register_prehook(lambda *gradients: unshard())
        return result


class Derivatives(Handler):
    """Watches ``torch.autograd.grad`` inside of a forward: its results can be differentiated again.

    A unit that runs is open, as it is in the backward of its outputs.  Tensors that leave it otherwise open it too.
    In a pipeline both ends must be in one of the ``links``, by name: otherwise one may be on another stage, which is
    refused.  ``opens`` is True if there are split units.
    """

    def __init__(self, current: CurrentForward, links: Collection[str], *, opens: bool) -> None:
        self.current, self.links = current, frozenset(links)
        self.rests = not opens

    def sees(self, func: Function) -> bool:
        return func is torch.autograd.grad

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        if self.links and not self._in_a_link() and not in_backward():
            raise ValueError(
                "torch.autograd.grad outside of the pipeline's links, in loss_fn or in the model's own forward: a "
                "stage has only its part of the graph. Take gradients inside of one link, or train without a pipe axis"
            )
        results = call_next(*args, **kwargs)
        units = self.current.context.units
        for tensor in tree_leaves(results) if units else ():
            if tensor is not None and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda *gradients: [unit.open_again() for unit in units] and None)
        return results

    def _in_a_link(self) -> bool:
        call: ModuleCall | None = self.current.context.module
        while call is not None and call.name not in self.links:
            call = call.outer
        return call is not None
