"""Backwards that can be taken once: their gradients are numbers, and remember nothing of how they were made.

A gradient that is differentiated again (``create_graph=True``, as for a gradient penalty) would be treated as a
constant where it is none.  torch's ``once_differentiable`` lets that pass where the gradient that comes in is a
constant itself, as that of a sum is; here it is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Backward = Callable[..., Any]


def no_double_backward(where: str, instead: str) -> Callable[[Backward], Backward]:
    """Makes a backward one that raises ValueError where its gradients are to be differentiated again.

    Args:
        where: what makes these gradients.
        instead: what makes gradients that can be.
    """

    def of(backward: Backward) -> Backward:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"create_graph=True (a gradient penalty), but gradients that {where} makes cannot be "
                    f"differentiated again: {instead}"
                )
            return backward(ctx, *gradients)

        return checked

    return of
