"""Two handlers: a parameter at rest is never read, and one that backward reads is there in time.

``AtRestCheck`` sees every function that reads a parameter of a split unit, and outside of the model's call those that
read a parameter of a stage:

- a unit that reads a parameter *at rest* borrows it: it is gathered now, and from then on whenever that unit is;
- outside of a unit's forward this raises, with the names of the parameter and the function;
- a unit that reads another's parameter *while the schedule holds it gathered* borrows it too, for in its backward it
  may be the first to read it;
- the node that the function leaves in the autograd graph will unshard the running unit before it runs.  A unit's
  outputs do so as well (see ``unshard``); this catches what leaves a module in other ways, an auxiliary loss for
  example.
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
    """Whether ``p.data = value`` changes nothing."""
    with DisableTorchFunction():
        layouts = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (parameter, value)]
    return layouts[0] == layouts[1]


class AtRestCheck(Handler):
    """Watches who reads parameters, by ``id``: those of ``split`` units, and in ``loss_fn`` those that are ``staged``,
    for it runs on one stage of several."""

    def __init__(self, current: CurrentForward, split: Mapping[int, nn.Parameter], staged: set[int]) -> None:
        self.current, self.split, self.staged = current, split, staged
        self.parameters = split.keys() | staged
        self.rests = not split  # else it gathers what is read

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
                if _is_itself(*args):  # as module.to() does with the dtype that it has
                    return None
                raise ValueError(
                    "p.data is replaced in a forward: the unit is resharded behind it, and the values would be lost. "
                    "Write between steps inside `with engine.gathered(..., modify=True)`"
                )
            func = call_next = Tensor.detach  # the same values, and of one version with the parameter: writes are seen
        result = call_next(*args, **kwargs)
        if read and context.units and torch.is_grad_enabled():
            unshard = context.units[-1].open_again
            for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda *gradients: unshard())
                    base = tensor._base if type(tensor) is Tensor else None
                    if base is not None and base.grad_fn is not None:  # what a write in place leaves of it
                        base.grad_fn.register_prehook(lambda *gradients: unshard())
        return result


class Derivatives(Handler):
    """Watches ``torch.autograd.grad`` inside of a forward: what it makes can be differentiated again.

    A unit that runs is open, as it is in the backward of what it returns; what leaves it in another way opens it too.
    In a pipeline both ends are in one of the ``links``, by name; else one may be on another stage, which is refused.
    ``opens``: there are split units.
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
