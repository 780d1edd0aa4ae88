"""Linear layers whose products another ``Gemm`` than torch's own makes, in forward and backward.

    F.linear(x, W, b)  ──►  Linear, the function of ``deferred_products``, with nothing put off

A function mode sees every ``F.linear`` of the forward, whoever calls it, and leaves everything else alone: products
written as ``x @ w``, the inside of ``nn.MultiheadAttention``, what autocast computes, subclasses of tensors, and what
will run again without being seen (a checkpoint around a function that is no module's call).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from plait.engine.deferred import plain
from plait.engine.deferred_products import linear
from plait.engine.rng import Streams
from plait.tensor.gemm import Gemm


class Multiply(TorchFunctionMode):
    """On while the model's forward runs; entered before modes that have linear layers of their own.

    Args:
        streams: know whether what runs now is seen again where it is recomputed; None: nothing is recomputed.
    """

    def __init__(self, gemm: Gemm, streams: Streams | None = None) -> None:
        super().__init__()
        self.gemm, self.streams = gemm, streams

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        seen = self.streams is None or self.streams.comes_back
        if func is F.linear and seen and all(plain(t) for t in (*args, *kwargs.values()) if t is not None):
            with torch._C.DisableTorchFunction():
                if (y := linear(*args, **kwargs, gemm=self.gemm, later=False)) is not None:
                    return y
        return func(*args, **kwargs)
