"""The end of a step of one rank on a device, for which its host waits for nothing.

    on the device   losses, norms, checks ─► the factor of the clip, and ``found_inf``: a bad step changes nothing
    on the host     the same numbers come to pinned memory; the first who asks reads them, or the next step

A step that is not finite is so told late: by the first look at its result, the next reduction, or a save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from plait.step.exchange import Report
from plait.step.step import StepResult

if TYPE_CHECKING:
    from plait.step.reduce import Reduce

Finish = Callable[[Iterable[float], int], tuple[Report, StepResult]]


def may_be_late(reduce: Reduce) -> bool:
    """True if the device alone can decide whether a step is made: on one rank, with optimizers that leave an update out
    on the device, as torch's fused ones do.

    The first update of SGD with momentum is none of these: left out, it would leave momenta without values.
    """
    optimizers, comm = reduce.placed.optimizers, reduce.placed.comm
    plain = comm.mesh.size == 1 and reduce.loss_scale is None and reduce.nonfinite == "raise" and optimizers
    return bool(plain) and all(
        type(one) in (Adam, AdamW, SGD)
        and group.get("fused")
        and (one.state or not group.get("momentum"))
        and all(parameter.device.type == comm.device.type for parameter in group["params"])
        for one in optimizers
        for group in one.param_groups
    )


class LateResult(StepResult):
    """The result of a step whose numbers are on their way from the device; the first look at one of them waits.

    Args:
        row: the numbers.  If one of them is not finite, the next update of the optimizers changes nothing.
        finish: makes the result of them, and raises if the step was not finite.
    """

    @torch.no_grad()
    def __init__(
        self, step: int, count: int, signal: int, row: Tensor, finish: Finish, optimizers: Sequence[Optimizer]
    ) -> None:
        found_inf = row.isfinite().all().logical_not().float()
        for one in optimizers:
            one.found_inf = found_inf  # type: ignore[attr-defined]
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda)
        host.copy_(row, non_blocking=True)
        came = torch.Event(row.device)
        came.record()
        vars(self).update(step=step, count=count, stop=(0, signal) if signal else None)
        vars(self).update(_host=host, _came=came, _finish=finish, _optimizers=optimizers, _seen=False)

    def settle(self) -> None:
        """Ends the step; raises the error of one that was not finite, unless a look at it has."""
        for one in self._optimizers:
            vars(one).pop("found_inf", None)
        if not self._seen:
            self.__getattr__("loss")

    def __getattr__(self, name: str) -> Any:
        """Gives what is not there yet."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(name)
        vars(self)["_seen"] = True
        self._came.synchronize()
        vars(self).update(vars(self._finish(self._host.tolist(), self.count)[1]))
        return vars(self)[name]


@torch.no_grad()
def clip_on_device(runs: Iterable[Tensor], norms: Sequence[Tensor], limit: float, dtype: torch.dtype) -> None:
    """Clips gradients whose blocks have these norms, as ``clip_factor`` and ``scale`` do with numbers of the host."""
    norm = torch.stack(tuple(norms)).square().sum().sqrt().to(dtype).double()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for run in runs:
        if run.dtype.itemsize == 2:  # a product of 16 bits would round the factor first
            run.copy_(run.float() * factor)
        else:
            run.mul_(factor)
