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


class WatchedHook:
    """A hook that may not write: before the step to parameters and gradients, behind it to parameters."""

    def __init__(self, hook: Callable[..., Any], written: Callable[[], int], *, behind: bool) -> None:
        self._hook, self._written, self._behind = hook, written, behind

    def __call__(self, optimizer: Optimizer, *call: Any) -> Any:
        before, count = self._seen(optimizer), self._written()
        result = self._hook(optimizer, *call)
        if self._written() == count and before != self._seen(optimizer):
            name = getattr(self._hook, "__qualname__", type(self._hook).__name__)
            raise ValueError(
                f"the hook {name!r} of {type(optimizer).__name__}.step writes to parameters or gradients of the "
                f"optimizer, and under this row these are flat pieces of a rank: clip by Engine(clip=...), write to "
                f"the model's parameters inside `with engine.gathered(modify=True)` behind the step, or use ddp"
            )
        return result

    @torch.no_grad()
    def _seen(self, optimizer: Optimizer) -> list[str]:
        """Of each tensor two sums: counts of writes leave out what goes through ``p.data``."""
        pieces: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [p.detach() for p in pieces]
        if not self._behind:
            tensors += [p.grad for p in pieces if p.grad is not None]
        real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors if x.numel()]
        sums = [torch.stack((x.sum(dtype=torch.float64), x.double().square().sum())) for x in real]
        return list(map(repr, torch.cat(sums).tolist())) if sums else []  # NaN has the text of NaN


def watch_hooks(optimizer: Optimizer, own: Collection[int], written: Callable[[], int]) -> None:
    """Put a ``WatchedHook`` in the place of each hook that is not the engine's ``own``, by the id of its handle.

    ``written`` counts what the program has written by the engine's own doors (``gathered(modify=True)``).
    """
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hooks in (before, behind):
        for key, hook in hooks.items():
            if key not in own and not isinstance(hook, WatchedHook):
                hooks[key] = WatchedHook(hook, written, behind=hooks is behind)
