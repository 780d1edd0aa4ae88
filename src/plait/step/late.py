"""The end of a step on one rank's device, without making its host wait.

    on the device   losses, norms, checks ─► the factor of the clip, and ``found_inf``: a bad step changes nothing
    on the host     the same numbers come to pinned memory; the first request reads them, or the next step

A step that is not finite raises late: at the first read of its result, the next reduction, or a save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from plait.step.exchange import Report
from plait.step.step import StepResult

if TYPE_CHECKING:
    from plait.step.reduce import Reducer

Finish = Callable[[Iterable[float], int], tuple[Report, StepResult]]


def may_be_late(reducer: Reducer) -> bool:
    """True if the device alone can decide whether a step is made: on one rank, with one optimizer that can leave an
    update out on the device, as torch's fused ones do.

    The first update of a parameter by SGD with momentum does not qualify: without it, the momentum has no values.
    """
    optimizers, comm = reducer.placed.optimizers, reducer.placed.comm
    plain = comm.mesh.size == 1 and reducer.loss_scale is None and reducer.nonfinite == "raise"
    if not plain or len(optimizers) != 1 or type(optimizers[0]) not in (Adam, AdamW, SGD):
        return False
    state = optimizers[0].state
    return all(
        group.get("fused")
        and all(p.device.type == comm.device.type for p in group["params"])
        and not (
            group.get("momentum") and any(state.get(p, {}).get("momentum_buffer") is None for p in group["params"])
        )
        for group in optimizers[0].param_groups
    )


class LateResult(StepResult):
    """The result of a step whose numbers are on their way from the device; the first read of one waits.

    Args:
        row: the numbers.  If one of them is not finite, the next update of the optimizers changes nothing.
        finish: makes the result from them, and raises if the step was not finite.
    """

    @torch.no_grad()
    def __init__(self, step: int, count: int, signal: int, row: Tensor, finish: Finish, optimizer: Optimizer) -> None:
        optimizer.found_inf = row.isfinite().all().logical_not().float()  # type: ignore[attr-defined]
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda)
        host.copy_(row, non_blocking=True)
        came = torch.Event(row.device)
        came.record()
        vars(self).update(step=step, count=count, stop=(0, signal) if signal else None)
        vars(self).update(_host=host, _came=came, _finish=finish, _optimizer=optimizer, _seen=False)

    def settle(self) -> None:
        """Ends the step; raises the error of one that was not finite, unless a read of it has."""
        if (optimizer := vars(self).pop("_optimizer", None)) is not None:
            vars(optimizer).pop("found_inf", None)
        if not self._seen:
            self.__getattr__("loss")

    def __getattr__(self, name: str) -> Any:
        """Waits for a field that has no value yet."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(name)
        self._came.synchronize()
        vars(self)["_seen"] = True
        vars(self).update(vars(self._finish(self._host.tolist(), self.count)[1]))
        self.settle()
        for done in ("_host", "_came", "_finish"):  # these hold the engine
            del vars(self)[done]
        return vars(self)[name]

    def __reduce__(self) -> tuple[type[StepResult], tuple[Any, ...]]:
        return StepResult, astuple(self)


@torch.no_grad()
def clip_on_device(runs: Iterable[Tensor], norms: Sequence[Tensor], limit: float, dtype: torch.dtype) -> None:
    """Clips gradients whose blocks have these norms, as ``clip_factor`` and ``scale`` do with numbers on the host."""
    norm = torch.stack(tuple(norms)).square().sum().sqrt().to(dtype).double()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for run in runs:
        if run.dtype.itemsize == 2:  # a product of 16 bits would round the factor first
            run.copy_(run.float() * factor)
        else:
            run.mul_(factor)
