"""Linear layers whose products are made by another ``Gemm`` than torch's own, in forward and backward: a handler.

    F.linear(x, W, b)  ──►  Linear, the function of ``deferred_products``, with nothing deferred

It leaves everything else alone: products written as ``x @ w``, the inside of ``nn.MultiheadAttention``, what autocast
computes, subclasses of tensors, and what will run again unseen (a checkpoint around a function that is no module's
call).
"""

from typing import Any

import torch
import torch.nn.functional as F

from plait.engine.forward.context import CurrentForward
from plait.engine.forward.deferred_products import linear
from plait.engine.forward.interceptor import Function, Handler
from plait.engine.forward.weight_grads import plain
from plait.tensor_parallel.gemm import Gemm


class GemmHandler(Handler):
    """Multiplies for linear layers."""

    def __init__(self, gemm: Gemm, current: CurrentForward) -> None:
        self.gemm, self.current = gemm, current

    def sees(self, func: Function) -> bool:
        return func is F.linear

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        if self.current.comes_back and all(plain(t) for t in (*args, *kwargs.values()) if t is not None):
            with torch._C.DisableTorchFunction():
                if (y := linear(*args, **kwargs, gemm=self.gemm, later=False)) is not None:
                    return y
        return call_next(*args, **kwargs)
