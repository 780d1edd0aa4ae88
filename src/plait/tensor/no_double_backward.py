"""Backwards whose gradients cannot be differentiated again, because their computation is not recorded.

Under ``create_graph=True`` (a gradient penalty) such a gradient would be taken for a constant.  torch's
``once_differentiable`` permits that where the incoming gradient is itself a constant, as that of a sum is; here it
raises at once.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Backward = Callable[..., Any]


def no_double_backward(where: str, instead: str) -> Callable[[Backward], Backward]:
    """Makes a backward raise ValueError under ``create_graph``: ``where`` cannot do it, ``instead`` is the fix."""

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
