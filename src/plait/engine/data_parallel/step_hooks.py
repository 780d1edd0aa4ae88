"""Hooks of the program's own on ``optimizer.step``, where what the optimizer has are pieces.

    optimizer.register_step_pre_hook(log_norms)       reads: goes on, and sees this rank's pieces
    optimizer.register_step_pre_hook(clip_each)       writes: refused, for it would have other numbers in each layout
    optimizer.register_step_post_hook(max_norm)       the same

The same code inside of an optimizer's own ``step`` is probed (see ``probe``); nothing probes a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LOOKS = 2
"""In its first calls a hook's numbers are compared, later the counts of writes, which ``p.data`` leaves alone."""


class WatchedHook:
    """A hook that may not write."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook, self._looks = hook, 0

    def __call__(self, optimizer: Optimizer, *call: Any) -> Any:
        self._looks += 1
        before = self._seen(optimizer)
        result = self._hook(optimizer, *call)
        if not _same(before, self._seen(optimizer)):
            name = getattr(self._hook, "__qualname__", type(self._hook).__name__)
            raise ValueError(
                f"the hook {name!r} of {type(optimizer).__name__}.step writes to parameters or gradients of the "
                f"optimizer, and under this row these are flat pieces of a rank: clip by Engine(clip=...), write to "
                f"the model's parameters inside `with engine.gathered(modify=True)` behind the step, or use ddp"
            )
        return result

    @torch.no_grad()
    def _seen(self, optimizer: Optimizer) -> list[Any]:
        pieces: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [tensor for p in pieces for tensor in (p.detach(), p.grad) if tensor is not None]
        if self._looks <= LOOKS:
            return [tensor.clone() for tensor in tensors]
        return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def _same(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return False
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


def watch_hooks(optimizer: Optimizer, own: Collection[int]) -> None:
    """Put a ``WatchedHook`` in the place of each hook that is not the engine's ``own``, by the id of its handle."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in hooks.items():
            if key not in own and not isinstance(hook, WatchedHook):
                hooks[key] = WatchedHook(hook)
