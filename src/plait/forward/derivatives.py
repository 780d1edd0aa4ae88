"""``torch.autograd.grad`` inside of a forward, a handler: what it makes can be differentiated again.

in loss_fn, or in the model     grad(y, x) goes through units at rest: what tells of any backward gathers them
in a unit's own forward         it reads the unit, which is open, as it is in the backward of what the unit returns;
                                what leaves it in another way opens it too: done here
in a pipeline                   y and x lie in one link; else x may be on another stage: refused here
"""

from collections.abc import Collection
from typing import Any

import torch

from plait.forward.context import CurrentForward, ModuleCall, in_backward
from plait.forward.interceptor import Function, Handler
from plait.torch_private import tree_leaves


class Derivatives(Handler):
    """Watches a stage's; ``links``: the names of a pipeline's, none where there is one stage."""

    in_silent = False

    def __init__(self, current: CurrentForward, links: Collection[str]) -> None:
        self.current, self.links = current, frozenset(links)

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
